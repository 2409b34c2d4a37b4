"""Messages between the daemon and an inspection."""

from __future__ import annotations

from gpupoold.wire.base import Message
from gpupoold.wire.records import ModelToLoad


class Inspect(Message):
    """Check a model for an emulated device or a GPU (daemon → inspection)."""

    model: ModelToLoad
    is_emulated: bool


class Inspected(Message):
    """The result of an inspection; ``error_code`` is set if the model cannot be served."""

    error_code: str = ""
    error_message: str = ""
    error_hint: str = ""
