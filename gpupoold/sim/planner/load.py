"""The load of a plan: Poisson arrivals at given rates, or recorded requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from gpupoold.domain import RequestRecord
from gpupoold.errors import UsageError
from gpupoold.sim.lengths import read_table, select_scenario, sharegpt_lengths
from gpupoold.sim.traces import MODEL, scale_time, spread, trace_requests
from gpupoold.sim.workloads import SimRequest, in_arrival_order, poisson_workload
from gpupoold.units import format_duration

USUAL_DURATION_S = 600.0
SHORT_DURATION_S = 300.0
_LONGEST_DURATION_S = 4 * 3600.0
# With fewer expected requests the run gets longer, with more requests shorter.
_FEW_REQUESTS, _MANY_REQUESTS = 200, 2000


class PlanLoad(Protocol):
    """An immutable source of requests that arrive in ``duration_s``."""

    @property
    def duration_s(self) -> float: ...

    @property
    def is_random(self) -> bool:
        """True if another seed gives other requests."""
        ...

    @property
    def text(self) -> str:
        """A description for people."""
        ...

    def draw(self, seed: int) -> tuple[SimRequest, ...]:
        """Return the requests of one run, in order of arrival."""
        ...

    def scaled(self, factor: float) -> Self:
        """Return the load with ``factor`` times as many requests per second."""
        ...

    def without(self, model: str) -> Self:
        """Return the load without one model's requests."""
        ...


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """Poisson arrivals, each model at its own rate, with ShareGPT lengths."""

    rates_rps: Mapping[str, float]
    duration_s: float

    @property
    def is_random(self) -> bool:
        return True

    @property
    def text(self) -> str:
        total_rps = math.fsum(self.rates_rps.values())
        return f"{total_rps:.3g} requests/s (Poisson arrivals, ShareGPT lengths)"

    def draw(self, seed: int) -> tuple[SimRequest, ...]:
        """Return Poisson arrivals. Raises UsageError for impossible rates."""
        return poisson_workload(self.rates_rps, self.duration_s, sharegpt_lengths(), seed)

    def scaled(self, factor: float) -> Self:
        rates = {model: rate * factor for model, rate in self.rates_rps.items()}
        return replace(self, rates_rps=rates)

    def without(self, model: str) -> Self:
        """Return the load without one model; other models' requests are unchanged."""
        return replace(self, rates_rps={m: r for m, r in self.rates_rps.items() if m != model})


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Recorded requests from time 0 on.

    With ``spread_over`` a seeded draw gives each request to a model of ``spread_over``, to the k-th
    with a probability proportional to 1/k.
    """

    requests: tuple[SimRequest, ...]
    duration_s: float
    source: str
    spread_over: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()

    @property
    def is_random(self) -> bool:
        """True if models are drawn."""
        return bool(self.spread_over)

    @property
    def text(self) -> str:
        """Rate and origin."""
        return f"{len(self.requests) / self.duration_s:.3g} requests/s ({self.source})"

    def draw(self, seed: int) -> tuple[SimRequest, ...]:
        """Return the requests; ``seed`` matters only if models are drawn."""
        requests: Sequence[SimRequest] = self.requests
        if self.spread_over:
            requests = spread(requests, self.spread_over, seed)
        return tuple(request for request in requests if request.model not in self.left_out)

    def scaled(self, factor: float) -> Self:
        """Return the same requests in ``1 / factor`` of the time, bursts included."""
        duration_s = self.duration_s / factor
        return replace(self, requests=scale_time(self.requests, 1 / factor), duration_s=duration_s)

    def without(self, model: str) -> Self:
        """Return the load without one model; other models' requests are unchanged."""
        return replace(self, left_out=self.left_out | {model})


def poisson_load(rates_rps: Mapping[str, float], duration_s: float | None = None) -> PoissonLoad:
    """Return Poisson arrivals for ``duration_s``, by default long enough for enough requests."""
    for model, rate_rps in rates_rps.items():
        if not (math.isfinite(rate_rps) and rate_rps > 0):
            raise UsageError(f"model {model!r}: rate {rate_rps:g} requests/s: must be above 0")
    total_rps = math.fsum(rates_rps.values())
    if duration_s is None:
        duration_s = _usual_duration_s(total_rps)
    return PoissonLoad(dict(rates_rps), duration_s)


def trace_load(path: Path, models: Sequence[str], duration_s: float | None = None) -> RecordedLoad:
    """Return the busiest ``duration_s`` of a CSV file with the columns of ``gpupool simulate``.

    Without a column ``model`` the requests are distributed over ``models``. Raises UsageError if
    the file has an error, or names a model outside of ``models``.
    """
    table = select_scenario(read_table(path), None)
    requests = trace_requests(table, models[0])
    unknown = sorted({request.model for request in requests} - set(models))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UsageError(
            f"{path}: asks for {', '.join(unknown[:3])}{more}, not among the models to plan for",
            f"the models are {', '.join(models[:10])}{', ...' if len(models) > 10 else ''}",
        )
    load = recorded_load(requests, path.name, duration_s)
    if MODEL not in table.columns and len(models) > 1:
        return replace(load, spread_over=tuple(models))
    return load


def history_load(
    records: Iterable[RequestRecord], models: Sequence[str], duration_s: float | None = None
) -> tuple[RecordedLoad, int]:
    """Return the busiest ``duration_s`` of a daemon's history, and the number of skipped requests.

    Requests of removed models and requests without a token are skipped. Raises UsageError if no
    request is left.
    """
    known = set(models)
    ordered = sorted(records, key=lambda record: record.arrived_at)
    usable = [
        record
        for record in ordered
        if record.model in known and min(record.num_prompt_tokens, record.num_output_tokens) > 0
    ]
    if not usable:
        raise UsageError(
            "the daemon has recorded no requests of these models",
            "let the daemon serve requests first, or give --trace FILE or --rps",
        )
    first_s = usable[0].arrived_at
    requests = in_arrival_order(
        SimRequest(
            "",
            record.model,
            record.arrived_at - first_s,
            record.num_prompt_tokens,
            record.num_output_tokens,
        )
        for record in usable
    )
    return recorded_load(requests, "recorded by the daemon", duration_s), len(ordered) - len(usable)


def recorded_load(
    requests: Sequence[SimRequest], source: str, duration_s: float | None = None
) -> RecordedLoad:
    """Return the ``duration_s`` of ``requests`` with the most arrivals.

    The default is ten minutes, or five if the busiest ten minutes have many requests. Raises
    UsageError if there are no requests.
    """
    if not requests:
        raise UsageError(f"{source}: no requests")
    wanted_s = duration_s
    if wanted_s is None:
        many = len(busiest(requests, USUAL_DURATION_S)) > _MANY_REQUESTS
        wanted_s = SHORT_DURATION_S if many else USUAL_DURATION_S
    length_s = requests[-1].arrival_s - requests[0].arrival_s
    if length_s < wanted_s:
        return RecordedLoad(_from_zero(requests), max(length_s, 1.0), source)
    chosen = busiest(requests, wanted_s)
    where = f"{source}, the busiest {format_duration(wanted_s)} of {format_duration(length_s)}"
    return RecordedLoad(_from_zero(chosen), wanted_s, where)


def busiest(requests: Sequence[SimRequest], duration_s: float) -> Sequence[SimRequest]:
    """Return the requests of the busiest stretch of ``duration_s``, the first of several."""
    times_s = [request.arrival_s for request in requests]
    ends = [bisect_left(times_s, begin_s + duration_s) for begin_s in times_s]
    start = max(range(len(ends)), key=lambda index: (ends[index] - index, -index))
    return requests[start : ends[start]]


class Admitted(NamedTuple):
    """Requests within the token limits of the models, and the effect of the limits."""

    requests: tuple[SimRequest, ...]
    num_refused: int
    num_cut: int


def admit(
    requests: Iterable[SimRequest], limits: Mapping[str, int], poolers: Collection[str] = ()
) -> Admitted:
    """Return the requests a daemon serves with ``limits[model]`` tokens for prompt and answer.

    Prompts that leave no space for an answer are refused; longer answers are cut. Requests of the
    models ``poolers`` have one result each.
    """
    asked = tuple(
        replace(request, output_tokens=1) if request.model in poolers else request
        for request in requests
    )
    kept = tuple(request for request in asked if request.prompt_tokens < limits[request.model])
    served = tuple(_cut(request, limits[request.model]) for request in kept)
    num_cut = sum(request is not other for request, other in zip(kept, served, strict=True))
    return Admitted(served, len(asked) - len(kept), num_cut)


def _cut(request: SimRequest, limit: int) -> SimRequest:
    room = limit - request.prompt_tokens
    return request if request.output_tokens <= room else replace(request, output_tokens=room)


def _from_zero(requests: Sequence[SimRequest]) -> tuple[SimRequest, ...]:
    first_s = requests[0].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - first_s) for request in requests)


def _usual_duration_s(total_rps: float) -> float:
    """Return a longer duration for few requests, for significance; a shorter duration for many."""
    if total_rps * USUAL_DURATION_S > _MANY_REQUESTS:
        return SHORT_DURATION_S
    duration_s = USUAL_DURATION_S
    while total_rps * duration_s < _FEW_REQUESTS and duration_s < _LONGEST_DURATION_S:
        duration_s = min(2 * duration_s, _LONGEST_DURATION_S)
    return duration_s
