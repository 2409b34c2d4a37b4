"""Bodies of the admin API for explanations and the history."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from gpupoold.api.schemas import Body, LiveProgress, LoadingInfo
from gpupoold.domain import Event, MemoryUse, Percentiles, RequestCounts, RequestRecord, Turns
from gpupoold.durations import Lateness, RequestStages


@dataclass
class _TimeSpan:
    """A span of ``span_s`` seconds that begins ``at`` (wall-clock seconds)."""

    at: float
    span_s: float


@dataclass(kw_only=True)
class SpanInfo(Percentiles, RequestCounts, _TimeSpan):
    """Counts of requests in a span of time, with the causes of lateness.

    ``first_token`` and ``between_tokens`` have the sums of all times to the first token and between
    tokens by stage; ``first_tokens`` requests have stages.
    """

    attainment: float | None
    lateness: Lateness
    first_token: RequestStages = field(default_factory=RequestStages)
    between_tokens: RequestStages = field(default_factory=RequestStages)


@dataclass(kw_only=True)
class ModelSpan(SpanInfo):
    """Counts of one model's requests in a span of time."""

    model: str


class DeviceTurns(Body, Turns):
    """The turns of a device, with the requests that wait for KV memory.

    ``loading`` is a model that is being loaded beside the turns. A group has ``num_gpus``; ``gpus``
    has the CUDA ordinals, and is empty for other kinds of device.
    """

    num_waiting_for_kv: int
    loading: LoadingInfo | None = None
    num_gpus: int = 1
    gpus: tuple[int, ...] = ()


@dataclass
class _RequestPlace:
    request_id: str
    model: str
    standing: str
    text: str
    device: int | None
    rule: str | None
    why: str | None
    num_before: int


class RequestWhy(Body, LiveProgress, _RequestPlace):  # has the fields of _RequestPlace first
    """The place of a live request; ``rule`` chose its device, None before.

    ``next_token_in_s`` is an estimate, None if impossible; ``late_s`` is the lateness of the latest
    token. ``num_before`` requests are ahead in the queue for KV memory. ``turns``: the turns of its
    device. ``also_live`` are further requests of the same HTTP request.
    """

    next_token_in_s: float | None
    late_s: float
    turns: DeviceTurns | None
    also_live: list[str] = Field(default_factory=list)


@dataclass
class _Device:
    device: int


class ModelOnDevice(Body, MemoryUse, _Device):  # the body has the field of _Device first
    """A model's memory and requests on one device.

    ``engine_bytes`` is the engine's memory outside the pages, ``hosting`` the reason for the engine
    on this device, and ``why_unshared`` the reason why no fine-tune can take the engine over.
    """

    num_requests: int
    turns: DeviceTurns
    engine_bytes: int = 0
    hosting: str = ""
    why_unshared: str = ""


class ModelWhy(Body):
    """A model's recent performance and the main obstacle.

    ``standings`` counts live requests by place. ``first_token_in_s`` estimates a new request with a
    prompt of ``prompt_tokens``. ``paced_gap_*_s`` are times between the released tokens of paced
    streams since the daemon's start, None without such streams. ``main_cause`` is the main cause of
    lateness within the hour; ``advice`` is a remedy. ``unbound_bytes`` are the weights
    that stay on devices without an engine.
    """

    name: str
    state: str
    text: str
    ttft_s: float
    tbt_s: float
    attainment_1m: float | None
    hour: SpanInfo
    cached_bytes: int
    weight_bytes: int
    standings: dict[str, int]
    devices: list[ModelOnDevice]
    prompt_tokens: int
    first_token_in_s: float | None
    paced_gap_p50_s: float | None = None
    paced_gap_p99_s: float | None = None
    main_cause: str | None
    advice: list[str]
    unbound_bytes: dict[int, int] = Field(default={})


class FinishedWhy(Body):
    """A finished request from the history, with events of its model."""

    request: RequestRecord
    device: int | None
    text: str
    events: list[Event]


class Why(Body):
    """Body of ``GET /why/{name}``: exactly one field is set."""

    request: RequestWhy | None = None
    model: ModelWhy | None = None
    finished: FinishedWhy | None = None
