"""The words of the project as types: ids, targets, states. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NewType, get_args

ModelName = NewType("ModelName", str)
RequestId = NewType("RequestId", str)
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
"""Largest share of the bytes in flight for one API key, so that no key keeps all others out."""


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


class EventSubject(StrEnum):
    """The kind of an event's subject; ``daemon`` is the daemon or a part of the daemon."""

    MODEL = "model"
    DEVICE = "device"
    FRONTEND = "frontend"
    KEY = "key"
    DAEMON = "daemon"


# The kinds of events in the history, by the kind of their subject.
ModelEvent = Literal[
    "model_added",
    "model_changed",
    "model_failed",
    "model_not_mounted",
    "model_quarantined",
    "model_recovered",
    "model_refused",
    "model_removed",
    "model_unloaded",
    "profile_incomplete",
    "refused",
    "request_cancelled",
    "request_convicted",
    "requests_suspected",
    "self_check_failed",
    "snapshot_refused",
    "warm_failed",
]
DeviceEvent = Literal[
    "drain_began", "drain_ended", "role_changed", "role_set", "worker_down", "worker_ready"
]
FrontendEvent = Literal["frontend_down"]
KeyEvent = Literal["key_added", "key_changed", "key_revoked", "key_rotated"]
DaemonEvent = Literal[
    "config_refused",
    "config_reloaded",
    "core_inconsistent",
    "daemon_started",
    "history",
    "no_api_key",
]
EventKind = ModelEvent | DeviceEvent | FrontendEvent | KeyEvent | DaemonEvent

EVENT_SUBJECTS: dict[str, EventSubject] = {
    kind: subject
    for subject, kinds in (
        (EventSubject.MODEL, ModelEvent),
        (EventSubject.DEVICE, DeviceEvent),
        (EventSubject.FRONTEND, FrontendEvent),
        (EventSubject.KEY, KeyEvent),
        (EventSubject.DAEMON, DaemonEvent),
    )
    for kind in get_args(kinds)
}
