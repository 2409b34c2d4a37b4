"""Models that take no requests while the remaining requests end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.errors import Refused, TimedOut

_DRAIN_POLL_S = 0.05


class Drains(ModelPart):
    """Drains models before an unload or a removal."""

    def __init__(self, parts: ControlParts) -> None:
        super().__init__(parts)
        self._live = parts.dispatcher.live

    @contextlib.contextmanager
    def closed(self, model: str) -> Iterator[None]:
        """Refuse new requests of a model inside the context; other models can change meanwhile.

        Raises:
            Refused: the model is closed already.
        """
        if self._fleet.is_draining(model):
            raise Refused(
                f"{model} is being unloaded or removed",
                "wait until the unload or removal has ended",
            )
        with self._fleet.draining(model):
            yield

    def check_idle(self, model: str) -> None:
        """Raise Refused if the model or adapter has live requests."""
        num_live = self._num_live(model)
        if num_live:
            raise Refused(
                f"{model} has {num_live} live requests", "use --drain to wait or --force to cancel"
            )

    async def wait_idle(self, model: str) -> None:
        """Return when a model or adapter has no live requests.

        Raises:
            TimedOut: requests are left after ``limits.drain_timeout``.
        """
        limit_s, loop = self._settings.limits.drain_timeout_s, asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while num_live := self._num_live(model):
            if loop.time() > deadline_s:
                raise TimedOut(
                    f"{model}: {num_live} requests still run after {limit_s:g} s",
                    "raise limits.drain_timeout or use --force",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    def _num_live(self, name: str) -> int:
        return max(self._live.num_of(name), self._live.num_of_name(name))
