"""The section ``[idle]``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from gpupoold.config.values import DurationOrZero, Effect, Section


class IdleSettings(Section):
    """``[idle]``: devices without requests."""

    effect: ClassVar[Effect] = Effect.LIVE

    park_after_s: DurationOrZero = Field(default=0.0, alias="park_after")
    """A device without requests for so long, such as `"30m"`, gives its memory
    back until the next request; 0: never.
    """
