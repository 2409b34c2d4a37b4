"""Random arrivals: Poisson streams with a rate per model.

Each model draws arrivals and lengths from generators seeded by the run's seed and the model's name:
a further model, another rate or another duration leaves the lengths of a model's n-th request
unchanged, so that runs can be compared request by request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from random import Random

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import LengthSource

MAX_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request to come. ``arrival_s`` counts from the start of the run.

    A turn of a ``conversation`` has a prompt whose first ``history_tokens`` are those of the turns
    before.
    """

    id: str
    model: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    conversation: str = ""
    history_tokens: int = 0


def model_names(num_models: int) -> list[str]:
    """Return ``m00``, ``m01``, ... Raises UsageError for less than one."""
    if num_models < 1:
        raise UsageError(f"{num_models} models: at least one is needed")
    width = max(2, len(str(num_models - 1)))
    return [f"m{number:0{width}}" for number in range(num_models)]


def equal_rates(models: Sequence[str], rate_rps: float) -> dict[str, float]:
    """Return ``rate_rps`` for each model.

    Raises UsageError if there are no models, a name repeats, or the rate is not positive.
    """
    name, times = max(Counter(models).items(), key=lambda item: item[1], default=("", 1))
    if times > 1:
        raise UsageError(f"model {name!r} is named {times} times")
    return _checked(dict.fromkeys(models, rate_rps))


def poisson_workload(
    rates_rps: Mapping[str, float], duration_s: float, lengths: LengthSource, seed: int
) -> tuple[SimRequest, ...]:
    """Return Poisson arrivals in ``[0, duration_s)``, each model at its own rate, in order.

    Equal arguments give equal requests in any process, whatever the order of the models. The result
    may be empty by chance. Raises UsageError if there are no models, a rate or the duration is not
    positive, or the requests are far too many.
    """
    rates = _checked(rates_rps)
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise UsageError(f"duration {duration_s} s: must be above 0")
    expected = sum(rates.values()) * duration_s
    if expected > MAX_REQUESTS:
        raise UsageError(f"about {expected:.3g} requests: at most {MAX_REQUESTS} fit in a run")
    streams = (_stream(model, rates[model], duration_s, lengths, seed) for model in sorted(rates))
    return in_arrival_order(request for stream in streams for request in stream)


def in_arrival_order(requests: Iterable[SimRequest]) -> tuple[SimRequest, ...]:
    """Return the requests sorted by arrival (stable) with new ids: ``r0``, ``r1``, ..."""
    ordered = sorted(requests, key=attrgetter("arrival_s"))
    return tuple(replace(request, id=f"r{number}") for number, request in enumerate(ordered))


def _stream(
    model: str, rate_rps: float, duration_s: float, lengths: LengthSource, seed: int
) -> Iterator[SimRequest]:
    """Yield one model's requests, without ids."""
    gaps, sizes = (Random(f"{seed}/{model}/{use}") for use in ("arrivals", "lengths"))
    arrival_s = gaps.expovariate(rate_rps)
    while arrival_s < duration_s:
        prompt_tokens, output_tokens = lengths.sample(sizes)
        yield SimRequest("", model, arrival_s, prompt_tokens, output_tokens)
        arrival_s += gaps.expovariate(rate_rps)


def _checked(rates_rps: Mapping[str, float]) -> dict[str, float]:
    if not rates_rps:
        raise UsageError("no models: at least one is needed")
    for model, rate_rps in rates_rps.items():
        if not (math.isfinite(rate_rps) and rate_rps > 0):
            raise UsageError(f"model {model!r}: rate {rate_rps} requests/s: must be above 0")
    return dict(rates_rps)
