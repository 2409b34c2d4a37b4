"""The kinds of events in the history. Standard library only."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, get_args


class EventSubject(StrEnum):
    """The kind of an event's subject; ``daemon`` is the daemon or a part of the daemon."""

    MODEL = "model"
    DEVICE = "device"
    FRONTEND = "frontend"
    KEY = "key"
    DAEMON = "daemon"


# By the kind of the subject.
ModelEvent = Literal[
    "adapter_added",
    "adapter_failed",
    "adapter_removed",
    "device_rests",
    "engine_evicted",
    "model_added",
    "model_changed",
    "model_failed",
    "model_not_mounted",
    "model_placed",
    "model_quarantined",
    "model_recovered",
    "model_refused",
    "model_removed",
    "model_unloaded",
    "preset_added",
    "preset_removed",
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
    "device_parked",
    "device_woken",
    "drain_began",
    "drain_ended",
    "role_changed",
    "role_set",
    "worker_down",
    "worker_ready",
]
FrontendEvent = Literal["frontend_down"]
KeyEvent = Literal["batch_waits", "key_added", "key_changed", "key_revoked", "key_rotated"]
DaemonEvent = Literal[
    "config_refused",
    "config_reloaded",
    "core_inconsistent",
    "daemon_started",
    "fleet_changed",
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
