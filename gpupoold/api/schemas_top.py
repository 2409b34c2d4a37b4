"""Bodies of what ``gpupool top`` looks at and does: one picture of all, turns, unloading."""

from __future__ import annotations

from typing import Literal

from gpupoold.api.schemas import (
    Body,
    DeviceInfo,
    EventInfo,
    ModelUsage,
    RequestInfo,
    Status,
)

UnloadMode = Literal["refuse", "drain", "force"]
SwitchKind = Literal["none", "pages", "kv", "weights"]


class TurnInfo(Body):
    """A turn that is over; ids grow by one while the daemon runs.

    ``began_at`` (wall-clock seconds) is when the model could run. ``switch_kind`` is the most
    that was moved for it in the ``switch_s`` before: weights, or KV, or nothing though pages
    were mapped (``pages``), or nothing at all (``none``). A switch whose turn never came, as
    plans changed, is a turn of 0 s that ``did_run`` not.
    """

    id: int
    device: int
    model: str
    began_at: float
    seconds: float
    num_tokens: int
    switch_kind: SwitchKind
    switch_s: float
    did_run: bool = True


class TopModel(Body):
    """A model's row: what it has and does, its targets, and where it is.

    All of its weights are on ``devices``.
    """

    usage: ModelUsage
    ttft_s: float
    tbt_s: float
    is_pinned: bool
    devices: list[int]


class Top(Body):
    """``GET /top``: everything at one moment, ``at`` (wall-clock seconds).

    ``requests`` are the oldest live ones, as many as were asked for; ``turns`` and ``events``
    those after the ids that were named, the latest where there are more.
    """

    at: float
    status: Status
    devices: list[DeviceInfo]
    models: list[TopModel]
    requests: list[RequestInfo]
    turns: list[TurnInfo]
    last_turn_id: int
    events: list[EventInfo]
    last_event_id: int
    num_switches: int
    switched_bytes: int


class Unloaded(Body):
    """What ``DELETE /loaded/{name}`` freed: bytes on devices and of host memory."""

    name: str
    device_bytes: int
    host_bytes: int


class CancelledRequest(Body):
    """A request that ``DELETE /requests/{id}`` ended."""

    request_id: str
    model: str
    num_output_tokens: int
