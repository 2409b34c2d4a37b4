"""Baseline: a device serves one model until its requests are done (as ServerlessLLM does).

Which request goes to which device, and when, is its placement's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpupoold.domain import Targets
from gpupoold.scheduling.turns import SwitchCost, Turn


@dataclass(slots=True)
class _Request:
    arrival_s: float
    num_tokens: int = 0


@dataclass(slots=True)
class _Model:
    targets: Targets
    requests: dict[str, _Request] = field(default_factory=dict)


class RequestLevelScheduler:
    """First come, first served by model, each until it has nothing left."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._current: str | None = None

    def add_model(self, model: str, targets: Targets) -> None:
        """A model can be scheduled from now on."""
        self._models[model] = _Model(targets)

    def arrive(self, model: str, request_id: str, arrival_s: float) -> None:
        """A request came in."""
        self._models[model].requests[request_id] = _Request(arrival_s)

    def progress(self, model: str, request_id: str, num_tokens: int) -> None:
        """A request gained tokens."""
        request = self._models[model].requests.get(request_id)
        if request is not None:
            request.num_tokens += num_tokens

    def finish(self, model: str, request_id: str) -> None:
        """A request ended."""
        self._models[model].requests.pop(request_id, None)

    def observe_step(self, model: str, step_s: float) -> None:
        """Step times do not matter here."""

    def num_live(self, model: str) -> int:
        """Requests of the model that have not ended."""
        return len(self._models[model].requests)

    def next_deadline_s(self, model: str) -> float:
        """The earliest deadline among the model's requests; infinity without any."""
        state = self._models[model]
        due = (state.targets.deadline_s(r.arrival_s, r.num_tokens) for r in state.requests.values())
        return min(due, default=math.inf)

    def working_models(self) -> list[str]:
        """Models that have requests."""
        return [name for name, model in self._models.items() if model.requests]

    def next_turn(self, now_s: float, cost: SwitchCost) -> Turn | None:
        """The present model while it has requests, else the one at the head of the queue."""
        working = self.working_models()
        if not working:
            self._current = None
            return None
        if self._current not in working:
            self._current = min(working, key=self._rank)
        return Turn(self._current, math.inf, math.inf)

    def turn_is_over(self, turn: Turn, now_s: float) -> bool:
        """When the model has no requests left."""
        return not self._models[turn.model].requests

    def upcoming(self) -> str | None:
        """The head of the queue behind the present model."""
        waiting = [name for name in self.working_models() if name != self._current]
        return min(waiting, key=self._rank, default=None)

    def _rank(self, name: str) -> tuple[float, str]:
        return min(request.arrival_s for request in self._models[name].requests.values()), name
