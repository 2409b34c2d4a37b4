"""Bodies of the admin API that explain and look back."""

from __future__ import annotations

from gpupoold.api.schemas import Body, EventInfo, RequestRecord


class LatenessInfo(Body):
    """Seconds by which answers got later than they were, by what they spent the time on.

    ``loading``: until their model was in host memory. ``queueing``: until its turn.
    ``switching``: while it was brought in. ``computing``: in its own steps.
    """

    loading_s: float
    queueing_s: float
    switching_s: float
    computing_s: float


class SpanInfo(Body):
    """What happened to requests in a span of time that begins ``at`` (wall-clock seconds).

    ``refused`` requests were not taken and are none of ``requests``; ``dropped`` ones ended
    before they began, as it was too late for them, and are among the ``failed``.
    """

    at: float
    span_s: float
    requests: int
    completed: int
    aborted: int
    failed: int
    refused: int
    dropped: int
    tokens: int
    tokens_in_time: int
    attainment: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    lateness: LatenessInfo


class WaitingTurn(Body):
    """A model in line for a device; times are None where the policy does not say.

    ``rule`` put it where it is; ``why`` is that rule as a sentence.
    """

    model: str
    rule: str
    why: str
    starts_in_s: float | None
    duration_s: float | None
    num_requests: int


class DeviceTurns(Body):
    """The turn under way on a device and the line behind it.

    ``left_s`` is None where the turn has no end of its own: nobody waits.
    """

    device: int
    on_turn: str | None
    rule: str | None
    why: str | None
    used_s: float
    left_s: float | None
    line: list[WaitingTurn]
    num_waiting_for_kv: int


class RequestWhy(Body):
    """Where a live request is. ``rule`` has given it its device, None before.

    ``next_token_in_s`` is an estimate, None where nothing can be said; ``late_s``: of its
    latest token. ``num_before`` wait for KV room before it. ``turns``: the turns of its device.
    """

    request_id: str
    model: str
    standing: str
    text: str
    device: int | None
    rule: str | None
    why: str | None
    num_before: int
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    next_deadline_in_s: float
    next_token_in_s: float | None
    late_s: float
    turns: DeviceTurns | None


class ModelOnDevice(Body):
    """What one device has of a model."""

    device: int
    weights_resident_bytes: int
    weights_total_bytes: int
    kv_resident_bytes: int
    kv_host_bytes: int
    num_requests: int
    turns: DeviceTurns


class ModelWhy(Body):
    """How a model does and what stands in its way.

    ``standings`` counts its live requests by where they are. ``first_token_in_s``: of a
    request with a prompt as long as ``prompt_tokens`` that came now. ``main_cause`` of what was
    late within the hour; ``advice`` is what to change.
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
    main_cause: str | None
    advice: list[str]


class FinishedWhy(Body):
    """A request that has ended, from the history, and what happened to its model meanwhile."""

    request: RequestRecord
    device: int | None
    text: str
    events: list[EventInfo]


class Why(Body):
    """``GET /why/{name}``: one of the three."""

    request: RequestWhy | None = None
    model: ModelWhy | None = None
    finished: FinishedWhy | None = None
