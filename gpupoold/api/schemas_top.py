"""Bodies for ``gpupool top`` and its actions: the whole state, turns, unloading."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from gpupoold.api.schemas import Body, ModelUsage, Running, Status
from gpupoold.domain import Event, LargestTransfer


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """A finished turn; ids increase by one while the daemon runs.

    ``began_at`` (wall-clock seconds) is the time when the model could run. ``switch_kind`` is the
    largest kind of transfer during the preceding ``switch_s``: weights, KV, only mappings
    (``pages``) or ``none``. A prefetch whose turn was cancelled is a turn of 0 s with ``did_run``
    false.
    """

    id: int
    device: int
    model: str
    began_at: float
    seconds: float
    num_tokens: int
    switch_kind: LargestTransfer
    switch_s: float
    did_run: bool = True


class TopModel(Body):
    """A model's row: targets, memory, requests and devices.

    ``devices`` have all weights of the model; ``fixed_devices`` were chosen by hand for its
    engines.
    """

    usage: ModelUsage
    ttft_s: float
    tbt_s: float
    is_pinned: bool
    devices: list[int]
    fixed_devices: list[int] = Field(default_factory=list)


class Top(Running):
    """Body of ``GET /top``: the state ``at`` one moment (wall-clock seconds).

    ``requests`` are the oldest live requests up to the asked number; ``turns`` and ``events``
    follow the given ids, the latest ones if there are more.
    """

    at: float
    status: Status
    models: list[TopModel]
    turns: list[TurnInfo]
    last_turn_id: int
    events: list[Event]
    last_event_id: int


class Unloaded(Body):
    """Bytes that ``DELETE /loaded/{name}`` freed on devices and in host memory."""

    name: str
    device_bytes: int
    host_bytes: int


class CancelledRequest(Body):
    """What ``DELETE /requests/{id}`` ended: ``num_requests`` prompts or samples of one client's
    request, of which ``request_id`` is the first.
    """

    request_id: str
    model: str
    num_output_tokens: int
    num_requests: int = 1
