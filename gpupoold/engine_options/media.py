"""The limits of a prompt's images, audio and video, for engines and frontends alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def media_limits(given: Mapping[str, Any] | None, max_images: int) -> dict[str, Any]:
    """Return vLLM's ``limit_mm_per_prompt`` from a model's option of that name.

    ``max_images`` is the limit without the option. Audio and video are not served.
    """
    limits = {"image": max_images, "vision_chunk": max_images} | dict(given or {})
    return limits | {"audio": 0, "video": 0}
