"""Metrics of a run: three definitions of attainment, TTFT, TBT and goodput.

Worked example, also a test: TTFT 3 s, TBT 2 s, arrival at 0, tokens at 3, 6, 7, 8 s.

- *Token attainment* (gpupool's): deadlines 3, 5, 7, 9 are fixed at arrival; the token at 6 s missed
  the deadline at 5 s: 3 of 4 = 0.75.
- *On-schedule share*: until 3 s no token is overdue, and the next token is due at 5. That token
  comes at 6, one second overdue, and the clock restarts there: the next token is due at 8, the
  following token at 10. 7 of 8 seconds = 0.875.
- *Artifact attainment*: the definition in the plotting script of the Aegaeon artifact. The time
  from the last token on time (3 s) to the late token (6 s) counts as lost: 5 of 8 seconds = 0.625.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpupoold.domain import Targets
from gpupoold.sim.workloads import SimRequest
from gpupoold.stats.histogram import percentile

GOODPUT_ATTAINMENT = 0.9
# Allowance for the rounding error of a difference between two large times.
_ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True)
class RequestResult:
    """A request with its targets and the times of its tokens."""

    request: SimRequest
    targets: Targets
    token_times_s: Sequence[float]

    def check(self, end_s: float) -> None:
        """Raise ValueError unless the tokens are in order, within the run and not too many."""
        times = self.token_times_s
        request = self.request
        if len(times) > request.output_tokens:
            raise ValueError(f"{request.id}: {len(times)} tokens of {request.output_tokens}")
        path_s = (request.arrival_s, *times, end_s)
        if any(map(operator.lt, path_s[1:], path_s)):
            raise ValueError(
                f"{request.id}: times go back: arrival, tokens, end of the run {path_s}"
            )

    @property
    def is_finished(self) -> bool:
        return len(self.token_times_s) == self.request.output_tokens

    def judged_until_s(self, end_s: float) -> float:
        """Return the time of the last token, or the end of the run for an unfinished request."""
        return self.token_times_s[-1] if self.is_finished else end_s


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Number of tokens due or produced, and the number on time."""

    num_due: int = 0
    num_in_time: int = 0


@dataclass(frozen=True, slots=True)
class SimPercentiles:
    """Nearest-rank percentiles in seconds; None without values."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one model, or of all models together.

    ``on_schedule`` and ``artifact`` are means over requests. ``first_in_time`` is the share of
    first tokens on time, of the first tokens produced or due; ``gaps_in_time`` is the share of
    times between tokens within the target. A share of nothing is None.
    """

    num_requests: int
    num_finished: int
    num_tokens: int
    tokens: TokenCount
    on_schedule: float | None
    artifact: float | None
    first_in_time: float | None
    gaps_in_time: float | None
    ttft_s: SimPercentiles
    tbt_s: SimPercentiles

    @property
    def attainment(self) -> float | None:
        """Share of tokens that met the deadline fixed at arrival; None when none was due."""
        return self.tokens.num_in_time / self.tokens.num_due if self.tokens.num_due else None


@dataclass(frozen=True, slots=True)
class Report:
    """All requests together, and each model in order of name."""

    overall: Summary
    models: dict[str, Summary]


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest load with enough attainment; a lower bound if every load tried had enough."""

    load: float
    is_lower_bound: bool


def count_tokens(result: RequestResult, end_s: float = math.inf) -> TokenCount:
    """Count the tokens produced or due, and the tokens on time by ``Targets.deadline_s``.

    A missing token counts as late if due by ``end_s``, and is left out if due later. With ``end_s``
    infinite every missing token counts as late.
    """
    deadline_s, arrival_s = result.targets.deadline_s, result.request.arrival_s
    times = result.token_times_s
    in_time = sum(map(operator.le, times, result.targets.deadlines_s(arrival_s, len(times))))
    missing = range(len(times), result.request.output_tokens)
    overdue = bisect.bisect_right(missing, end_s, key=lambda index: deadline_s(arrival_s, index))
    return TokenCount(len(times) + overdue, in_time)


def on_schedule_share(result: RequestResult, end_s: float = math.inf) -> float:
    """Return the share of a request's time during which the next token was not overdue.

    The time runs from arrival to the last token, or to ``end_s`` for an unfinished request. The
    first token is due ``ttft_s`` after arrival. A further token is due ``tbt_s`` after the previous
    deadline or, if the previous token was late, ``tbt_s`` after that token. A request of zero
    duration has 1; a request that waits for ever has 0.
    """
    targets, until_s = result.targets, result.judged_until_s(end_s)
    due_s = result.request.arrival_s + targets.ttft_s
    overdue_s = 0.0
    for at_s in result.token_times_s:
        if at_s > due_s:
            overdue_s += at_s - due_s
            due_s = at_s
        due_s += targets.tbt_s
    if not result.is_finished:
        overdue_s += max(0.0, until_s - due_s)
    return _share_not_lost(overdue_s, until_s - result.request.arrival_s)


def artifact_attainment(result: RequestResult, end_s: float = math.inf) -> float:
    """Return a request's attainment by the plotting script of the Aegaeon artifact.

    Unlike in ``on_schedule_share`` a late token loses the whole time since the deadline of the last
    token on time. Restarting the clock keeps the accumulated allowance: after the i-th token (from
    0), late or not, the next token may come up to ``ttft_s + (i + 1) * tbt_s`` after the base,
    where the base is the arrival or the last late token. So a late token makes the deadlines of all
    later tokens more lenient. Only for comparison with the paper's figures. An unfinished request
    is judged up to ``end_s`` (the artifact's runs always end with all requests finished).
    """
    targets, until_s = result.targets, result.judged_until_s(end_s)
    base_s = result.request.arrival_s
    allowance_s, kept_s, lost_s = targets.ttft_s, 0.0, 0.0
    for at_s in result.token_times_s:
        if at_s - base_s <= allowance_s:
            kept_s = allowance_s
        else:
            lost_s += at_s - base_s - kept_s
            base_s, kept_s = at_s, 0.0
        allowance_s += targets.tbt_s
    if not result.is_finished and until_s - base_s > allowance_s:
        lost_s += until_s - base_s - kept_s
    return _share_not_lost(lost_s, until_s - result.request.arrival_s)


def summarise(results: Iterable[RequestResult], end_s: float = math.inf) -> Report:
    """Return all figures of a run that ended at ``end_s``.

    Raises ValueError if a result's times contradict each other.
    """
    by_model: dict[str, _Tally] = {}
    for result in results:
        result.check(end_s)
        by_model.setdefault(result.request.model, _Tally()).add(result, end_s)
    tallies = [by_model[model] for model in sorted(by_model)]
    models = {model: by_model[model].summary() for model in sorted(by_model)}
    return Report(_Tally.of_all(tallies).summary(), models)


def goodput(
    points: Iterable[tuple[float, float]], threshold: float = GOODPUT_ATTAINMENT
) -> Goodput | None:
    """Return the highest load with an attainment of at least ``threshold``.

    ``points`` are pairs of load and attainment. Between the highest passing load and the next
    point, attainment is interpolated linearly. None if no load passed. Raises ValueError if there
    are no points, or a load repeats.
    """
    ordered = sorted(points)
    if not ordered:
        raise ValueError("goodput of no points")
    if any(one[0] == other[0] for one, other in itertools.pairwise(ordered)):
        raise ValueError(f"a load is given twice in {ordered}")
    passed = [index for index, (_, attainment) in enumerate(ordered) if attainment >= threshold]
    if not passed:
        return None
    load, attainment = ordered[passed[-1]]
    if passed[-1] + 1 == len(ordered):
        return Goodput(load, is_lower_bound=True)
    next_load, next_attainment = ordered[passed[-1] + 1]
    step = (attainment - threshold) / (attainment - next_attainment)
    return Goodput(load + step * (next_load - load), is_lower_bound=False)


class _Tally:
    """Sums over requests, for a summary."""

    def __init__(self) -> None:
        self.num_requests = self.num_finished = self.num_due = self.num_in_time = 0
        self.num_tokens = 0
        self.num_first_due = self.num_first_in_time = self.num_gaps_in_time = 0
        self.on_schedule: list[float] = []
        self.artifact: list[float] = []
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []

    @classmethod
    def of_all(cls, tallies: Iterable[_Tally]) -> _Tally:
        """Return the sum of ``tallies``."""
        total = cls()
        for tally in tallies:
            for name, value in vars(tally).items():
                vars(total)[name] += value
        return total

    def add(self, result: RequestResult, end_s: float) -> None:
        times, tokens = result.token_times_s, count_tokens(result, end_s)
        self.num_requests += 1
        self.num_finished += result.is_finished
        self.num_tokens += len(times)
        self.num_due += tokens.num_due
        self.num_in_time += tokens.num_in_time
        self.on_schedule.append(on_schedule_share(result, end_s))
        self.artifact.append(artifact_attainment(result, end_s))
        targets, arrival_s = result.targets, result.request.arrival_s
        self.num_first_due += bool(times) or arrival_s + targets.ttft_s <= end_s
        if times:
            self.ttfts_s.append(times[0] - arrival_s)
            self.num_first_in_time += times[0] <= arrival_s + targets.ttft_s
            gaps_s = list(map(operator.sub, times[1:], times))
            self.gaps_s += gaps_s
            longest_s = targets.tbt_s + _ROUNDING_S
            self.num_gaps_in_time += sum(map(longest_s.__ge__, gaps_s))

    def summary(self) -> Summary:
        return Summary(
            self.num_requests,
            self.num_finished,
            self.num_tokens,
            TokenCount(self.num_due, self.num_in_time),
            _mean(self.on_schedule),
            _mean(self.artifact),
            _share(self.num_first_in_time, self.num_first_due),
            _share(self.num_gaps_in_time, len(self.gaps_s)),
            _percentiles(self.ttfts_s),
            _percentiles(self.gaps_s),
        )


def _share_not_lost(lost_s: float, total_s: float) -> float:
    if math.isinf(lost_s):
        return 0.0
    return 1.0 - lost_s / total_s if total_s > 0 else 1.0


def _percentiles(values: list[float]) -> SimPercentiles:
    values.sort()  # ``percentile`` needs sorted values
    return SimPercentiles(*(percentile(values, fraction) for fraction in (0.5, 0.99)))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(shares: Sequence[float]) -> float | None:
    return math.fsum(shares) / len(shares) if shares else None
