"""Types for the project's terms: ids, targets, states. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

ModelName = NewType("ModelName", str)
DeviceId = NewType("DeviceId", int)

DEFAULT_TTFT_S = 10.0
DEFAULT_TBT_S = 0.1


@dataclass(frozen=True, slots=True)
class Targets:
    """A model's targets for its users.

    Token ``i`` (from 0) of a request is due at ``arrival + ttft_s + i * tbt_s``; a late token does
    not move later deadlines.
    """

    ttft_s: float = DEFAULT_TTFT_S
    tbt_s: float = DEFAULT_TBT_S

    def __post_init__(self) -> None:
        if not all(math.isfinite(target) and target > 0 for target in (self.ttft_s, self.tbt_s)):
            raise ValueError(
                f"targets must be positive and finite, got ttft {self.ttft_s}, tbt {self.tbt_s}"
            )

    def deadline_s(self, arrival_s: float, token_index: int) -> float:
        """Return the deadline of token ``token_index`` of a request that arrived at
        ``arrival_s``.
        """
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
    """A device's role: prompts, answers, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Priority(StrEnum):
    """A request's priority where memory or time is short, from its API key."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


KEY_BYTES_SHARE = 0.5
"""Largest share of the bytes in flight for one API key, so that no key blocks all others."""


class FinishReason(StrEnum):
    """The reason for the end of a request, in the history."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A registered model as stored in the registry.

    ``source`` is the user's text (a path or a Hugging Face id), ``path`` the resolved local folder.
    ``max_model_len`` None means the checkpoint's own limit.
    """

    name: ModelName
    source: str
    path: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    targets: Targets = field(default_factory=Targets)
    aliases: tuple[str, ...] = ()
