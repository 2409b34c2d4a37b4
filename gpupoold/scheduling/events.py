"""What the scheduling core is told. Plain data: a list of these, replayed, is the whole past.

Instants are seconds of any one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Priority, Role, Targets
from gpupoold.scheduling.costs import ModelCosts


@dataclass(frozen=True, slots=True)
class ModelAdded:
    """A model can have requests from now on; told again, its description is replaced.

    Requests of a model that no device hosts are held until one does.
    """

    model: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    costs: ModelCosts


@dataclass(frozen=True, slots=True)
class TargetsChanged:
    """New targets, for requests under way too."""

    model: str
    targets: Targets


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is gone, and all its requests with it."""

    model: str


@dataclass(frozen=True, slots=True)
class DeviceUp:
    """A device can serve: its bytes for weights and KV, and what a copy to it reaches.

    ``prefetches``: it brings in the next model during the turn before. ``kv_host_bytes``: of
    host memory for KV that has to make way; None: as much as it takes, so that no request
    ever waits for KV room. Devices of one ``kind`` are equally fast: the times of steps on one
    hold for all.
    """

    device: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    prefetches: bool = True
    kv_host_bytes: int | None = None
    role: Role = Role.MIXED
    is_role_fixed: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class DeviceDown:
    """A device is gone; its requests wait for another and start anew from their tokens."""

    device: int


@dataclass(frozen=True, slots=True)
class RoleSet:
    """A device has another role. Fixed: somebody wants it so; else the policy may change it."""

    device: int
    role: Role
    is_fixed: bool = True


@dataclass(frozen=True, slots=True)
class DrainSet:
    """A device is to be emptied, gets nothing new, and its requests go to others that can have
    them; or it may have work again."""

    device: int
    is_draining: bool


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """Copies to a device reach another bandwidth than was said when it came up."""

    device: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class QuotaMaxSet:
    """Turns are to be no longer than this, from the next that is planned on."""

    quota_max_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: once a second or so, for what a policy does by the clock."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A device can run a model: its engine is made, its snapshot is in host memory.

    ``costs`` are those on devices of its kind, None for those in the model's description.
    """

    device: int
    model: str
    costs: ModelCosts | None = None


@dataclass(frozen=True, slots=True)
class Unhosted:
    """A device can run a model no more; its requests there wait for another device."""

    device: int
    model: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request. ``output_tokens`` is known to a simulator only, for policies with an oracle.

    ``num_tokens`` are those of its answer that were made before its device was lost; they are
    prefilled with the prompt, but belong to the answer. The answer has ``max_tokens`` at most,
    None for no limit.
    """

    request_id: str
    model: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int | None = None
    priority: Priority = Priority.NORMAL
    num_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """Work done on a device: ``num_tokens`` more for each of ``request_ids``.

    ``step_s`` is the time of one decode step of these requests, None for a step that
    prefilled. With no tokens the time is all that is told.
    """

    device: int
    model: str
    request_ids: tuple[str, ...]
    num_tokens: int = 1
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """A request that was handed over can go on: its KV is in host memory for its new device.

    ``num_tokens`` are those of its answer by now, None if it got none on its way.
    """

    request_id: str
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A request is over, whatever the reason.

    ``is_complete``: its answer has come to its own end or to the request's limit. The length
    of one that was cancelled, failed or lost says nothing about how long answers get.
    """

    request_id: str
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """Bytes that a device would have to move now to run each of these models."""

    device: int
    missing_bytes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A device has ended a turn: quota used while others wait, or nothing left to do."""

    device: int
    turn_id: int


Event = (
    ModelAdded
    | TargetsChanged
    | ModelRemoved
    | DeviceUp
    | DeviceDown
    | RoleSet
    | DrainSet
    | BandwidthMeasured
    | QuotaMaxSet
    | Tick
    | Hosted
    | Unhosted
    | Arrived
    | Stepped
    | Attached
    | Ended
    | MemoryChanged
    | TurnEnded
)
