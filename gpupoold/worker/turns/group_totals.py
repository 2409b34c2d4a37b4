"""Messages of a group's leader in bytes of the whole group.

A worker counts the pages and bytes of one rank, which are equal on all ranks. The daemon sees the
group as one device: with the memory of all its GPUs, whole models, and the rate of all links.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel

_COUNTED = (
    m.WorkerReady,
    m.ModelLoaded,
    m.ModelUnloaded,
    m.MemoryReport,
    m.TurnReport,
    m.Switched,
    m.WorkerStatus,
)
_ENDINGS = ("_bytes", "_bytes_per_s", "_bytes_per_token")


class GroupChannel(BlockingChannel[m.ToWorker]):
    """The channel of a group's leader with the daemon."""

    num_ranks = 1

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        if self.num_ranks > 1 and isinstance(message, _COUNTED):
            message = of_group(message, self.num_ranks)
        super().send(message, fds)


def of_group(message: Any, num_ranks: int) -> Any:
    """Return a message with its bytes, and those of the messages inside, times ``num_ranks``."""
    changes: dict[str, Any] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name.endswith(_ENDINGS):
            changes[name] = _times(value, num_ranks)
        elif isinstance(value, msgspec.Struct):
            changes[name] = of_group(value, num_ranks)
        elif isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
            changes[name] = [of_group(one, num_ranks) for one in value]
    return msgspec.structs.replace(message, **changes)


def _times(value: Any, num_ranks: int) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: one * num_ranks for name, one in value.items()}
    return value * num_ranks
