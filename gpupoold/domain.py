"""The words of the project as types: ids, targets, states. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

ModelName = NewType("ModelName", str)
RequestId = NewType("RequestId", str)
DeviceId = NewType("DeviceId", int)

DEFAULT_TTFT_S = 10.0
DEFAULT_TBT_S = 0.1


@dataclass(frozen=True, slots=True)
class Targets:
    """What a model's users were promised.

    Token ``i`` (from 0) of a request is due at ``arrival + ttft_s + i * tbt_s``;
    a late token does not move later deadlines.
    """

    ttft_s: float = DEFAULT_TTFT_S
    tbt_s: float = DEFAULT_TBT_S

    def __post_init__(self) -> None:
        if not all(math.isfinite(target) and target > 0 for target in (self.ttft_s, self.tbt_s)):
            raise ValueError(
                f"targets must be positive and finite, got ttft {self.ttft_s}, tbt {self.tbt_s}"
            )

    def deadline_s(self, arrival_s: float, token_index: int) -> float:
        """When token ``token_index`` of a request that came at ``arrival_s`` is due."""
        return arrival_s + self.ttft_s + token_index * self.tbt_s


class ModelState(StrEnum):
    """Life of a registered model.

    ``registered`` (known, not loaded) → ``loading`` → ``ready``; ``draining``
    before removal; ``failed`` with a reason.
    """

    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Role(StrEnum):
    """What a device does: prompts, answers, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Priority(StrEnum):
    """Who goes first where there is not enough for all: what an API key gives its requests."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


KEY_BYTES_SHARE = 0.5
"""Of the bytes that requests in flight may have, what those of one API key may have: no key
keeps all others out."""


class FinishReason(StrEnum):
    """Why a request ended, in the registry's history."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One registered model as the registry keeps it.

    ``source`` is what the user asked for (a path or a Hugging Face id),
    ``path`` the local folder it resolved to. ``max_model_len`` None means the
    checkpoint's own limit.
    """

    name: ModelName
    source: str
    path: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    targets: Targets = field(default_factory=Targets)
    aliases: tuple[str, ...] = ()
