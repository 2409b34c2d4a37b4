"""The section ``[idle]``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gpupoold.config.values import DurationOrZero, Effect, Section


class IdleSettings(Section):
    """``[idle]``: a device without requests for ``park_after`` gives its memory back.

    0 keeps the devices ready.
    """

    effect: ClassVar[Effect] = Effect.LIVE

    park_after_s: DurationOrZero = Field(default=0.0, alias="park_after")
