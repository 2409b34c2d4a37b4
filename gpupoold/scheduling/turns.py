"""Which model runs next on a device, and for how long: weighted round-robin over batches.

A round visits each model that has requests once. A turn first prefills the
model's waiting requests, then decodes it for its quota. Pure: the shell reports
events and asks; nothing here knows clocks, engines or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpupoold.domain import Targets
from gpupoold.scheduling.quota import Load, limit_round, round_quotas_s

DEFAULT_QUOTA_MAX_S = 4.0
# A newcomer may have to wait for a whole round, and must then still be prefilled within its
# TTFT. Simulated, 0.5 instead costs 13 points of attainment at 130 models on 16 devices.
_ROUND_SHARE_OF_TTFT = 0.9
_FIRST_STEP_GUESS_S = 0.02
_SMOOTHING = 0.1
_MIN_STEP_S = 1e-6


@dataclass(slots=True)
class _Request:
    arrival_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class _Batch:
    targets: Targets
    requests: dict[str, _Request] = field(default_factory=dict)
    step_s: float = _FIRST_STEP_GUESS_S

    def next_deadline_s(self) -> float:
        return min(
            self.targets.deadline_s(request.arrival_s, request.num_tokens)
            for request in self.requests.values()
        )


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """Seconds to make each model resident now, and whether all of a set fit together."""

    switch_s: Mapping[str, float]
    full_switch_s: Mapping[str, float]
    all_fit: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """Run ``model`` until ``ends_at_s``, or longer while nobody else has work."""

    model: str
    quota_s: float
    ends_at_s: float


class TurnScheduler:
    """State of one device's work list. Times are seconds of any one monotonic clock."""

    def __init__(self, quota_max_s: float = DEFAULT_QUOTA_MAX_S) -> None:
        self._quota_max_s = quota_max_s
        self._batches: dict[str, _Batch] = {}
        self._round: list[str] = []
        self._quotas_s: dict[str, float] = {}

    def add_model(self, model: str, targets: Targets) -> None:
        """A model can be scheduled from now on."""
        self._batches[model] = _Batch(targets)

    def set_targets(self, model: str, targets: Targets) -> None:
        """New targets, for requests under way too."""
        self._batches[model].targets = targets

    def remove_model(self, model: str) -> None:
        """Forget a model and its requests."""
        del self._batches[model]
        self._round = [name for name in self._round if name != model]

    def arrive(self, model: str, request_id: str, arrival_s: float) -> None:
        """A request came in."""
        self._batches[model].requests[request_id] = _Request(arrival_s)

    def progress(self, model: str, request_id: str, num_tokens: int) -> None:
        """A request gained tokens; unknown requests (already cancelled) are ignored."""
        request = self._batches[model].requests.get(request_id)
        if request is not None:
            request.num_tokens += num_tokens

    def finish(self, model: str, request_id: str) -> None:
        """A request ended, whatever the reason."""
        self._batches[model].requests.pop(request_id, None)

    def observe_step(self, model: str, step_s: float) -> None:
        """A decode step of the model took ``step_s``."""
        batch = self._batches[model]
        smoothed_s = batch.step_s + _SMOOTHING * (step_s - batch.step_s)
        batch.step_s = max(smoothed_s, _MIN_STEP_S)

    def num_live(self, model: str) -> int:
        """Requests of the model that have not ended."""
        return len(self._batches[model].requests)

    def live_requests(self, model: str) -> list[str]:
        """Ids of the model's requests that have not ended."""
        return list(self._batches[model].requests)

    def num_waiting(self, model: str) -> int:
        """Requests of the model that have no token yet."""
        requests = self._batches[model].requests.values()
        return sum(1 for request in requests if not request.num_tokens)

    def next_deadline_s(self, model: str) -> float:
        """The earliest deadline among the model's requests; infinity without any."""
        batch = self._batches[model]
        return batch.next_deadline_s() if batch.requests else float("inf")

    def has_work(self) -> bool:
        """Whether any model has a request."""
        return any(batch.requests for batch in self._batches.values())

    def working_models(self) -> list[str]:
        """Models that have requests."""
        return [name for name, batch in self._batches.items() if batch.requests]

    def next_turn(self, now_s: float, cost: SwitchCost) -> Turn | None:
        """The next turn, or None without work. A new round starts when the last one is through."""
        working = set(self.working_models())
        self._round = [name for name in self._round if name in working]
        if not self._round:
            if not working:
                return None
            self._start_round(cost)
        model = self._round.pop(0)
        quota_s = self._quotas_s[model]
        return Turn(model, quota_s, now_s + cost.switch_s[model] + quota_s)

    def turn_is_over(self, turn: Turn, now_s: float) -> bool:
        """Whether to give the device away: no work left, or the quota is used and others wait."""
        batch = self._batches.get(turn.model)
        if batch is None or not batch.requests:
            return True
        return now_s >= turn.ends_at_s and len(self.working_models()) > 1

    def upcoming(self) -> str | None:
        """The model whose turn comes next in this round."""
        return next((name for name in self._round if self._batches[name].requests), None)

    def _start_round(self, cost: SwitchCost) -> None:
        """Earliest deadline first, but adjacent to what is resident: resident models lead ties."""
        order = sorted(
            self.working_models(),
            key=lambda name: (self._batches[name].next_deadline_s(), cost.switch_s[name], name),
        )
        loads = [Load(self._batches[n].targets.tbt_s, self._batches[n].step_s) for n in order]
        seconds = cost.switch_s if cost.all_fit else cost.full_switch_s
        costs_s = [seconds[name] for name in order] if len(order) > 1 else [0.0]
        quotas_s = round_quotas_s(loads, sum(costs_s), self._quota_max_s)
        limit_s = min(self._batches[n].targets.ttft_s for n in order) * _ROUND_SHARE_OF_TTFT
        floors_s = [max(load.step_s, cost_s) for load, cost_s in zip(loads, costs_s, strict=True)]
        limited_s = limit_round(quotas_s, sum(costs_s), limit_s, floors_s)
        # A turn cannot be shorter than a step, however little there is to switch.
        turns_s = [max(q, load.step_s) for q, load in zip(limited_s, loads, strict=True)]
        self._round = order
        self._quotas_s = dict(zip(order, turns_s, strict=True))
