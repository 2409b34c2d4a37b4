"""Messages between the daemon and an inspection."""

from __future__ import annotations

from gpupoold.wire.base import Message
from gpupoold.wire.records import ModelToLoad


class Inspect(Message):
    """Check a model for an emulated device or a GPU, and for groups of ``degrees`` GPUs (daemon →
    inspection).
    """

    model: ModelToLoad
    is_emulated: bool
    degrees: tuple[int, ...] = ()


class Inspected(Message):
    """The result of an inspection; ``error_code`` is set if the model cannot be served.

    ``undivided`` has the degrees of groups that cannot divide the model, with the reason.
    """

    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""
    undivided: dict[int, str] = {}
