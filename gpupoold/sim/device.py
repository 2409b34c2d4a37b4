"""One simulated device: turns, prefills and decode steps in virtual time.

It does what the instance's turn loop does, with the same policy objects. Decode
steps of an unchanged batch are taken together as one *segment*, which is cut at
the next step boundary when something happens that the turn loop would react to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpupoold.scheduling.placement import DeviceView
from gpupoold.scheduling.policy import DevicePolicy
from gpupoold.scheduling.turns import SwitchCost, Turn
from gpupoold.sim.clock import EventQueue, Scheduled
from gpupoold.sim.memory import SimMemory
from gpupoold.sim.model import SimModel
from gpupoold.sim.workloads import SimRequest

_MAX_SEGMENT_STEPS = 4096


@dataclass(slots=True, eq=False)
class SimLive:
    """A request on a device; ``token_times_s`` grow as it is served."""

    request: SimRequest
    token_times_s: list[float] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens still to come."""
        return self.request.output_tokens - len(self.token_times_s)

    @property
    def context_tokens(self) -> int:
        """Tokens in its KV."""
        return self.request.prompt_tokens + len(self.token_times_s)


@dataclass(slots=True)
class _Segment:
    model: str
    start_s: float
    step_s: float
    num_steps: int
    event: Scheduled[Callable[[], None]]


@dataclass(slots=True)
class DeviceTally:
    """What a device did."""

    turns: int = 0
    switches: int = 0
    moved_bytes: int = 0
    switch_s: float = 0.0
    busy_s: float = 0.0


class SimDevice:
    """Runs requests by a policy; ``on_end`` is told of every request that ends."""

    def __init__(
        self,
        number: int,
        models: Mapping[str, SimModel],
        policy: DevicePolicy,
        capacity_bytes: int,
        queue: EventQueue[Callable[[], None]],
        on_end: Callable[[int, SimLive], None],
        *,
        prefetches: bool = True,
    ) -> None:
        self.number = number
        self.tally = DeviceTally()
        self._models = models
        self._policy = policy
        self._queue = queue
        self._on_end = on_end
        self._prefetches = prefetches
        self._memory = SimMemory(capacity_bytes, models, self._use_of)
        self._capacity_bytes = capacity_bytes
        self._waiting: dict[str, list[SimLive]] = {}
        self._running: dict[str, list[SimLive]] = {}
        self._turn: Turn | None = None
        self._segment: _Segment | None = None
        for name, model in models.items():
            policy.add_model(name, model.targets)

    def view(self) -> DeviceView:
        """The device as placement sees it."""
        working = self._policy.working_models()
        num_live = sum(self._policy.num_live(name) for name in working)
        return DeviceView(self.number, num_live, frozenset(working), self._memory.resident)

    def add(self, live: SimLive) -> None:
        """A request to serve."""
        request = live.request
        self._policy.arrive(request.model, request.id, request.arrival_s)
        self._waiting.setdefault(request.model, []).append(live)
        if self._turn is None:
            self._next_turn()
        elif self._segment is not None:
            self._cut(self._turn, request.model)

    def flush(self, end_s: float) -> None:
        """Write down the tokens of a segment that the end of the run cuts off."""
        segment = self._segment
        if segment is None:
            return
        times_s = [segment.start_s + (k + 1) * segment.step_s for k in range(segment.num_steps)]
        for live in self._running[segment.model]:
            live.token_times_s.extend(at_s for at_s in times_s if at_s <= end_s)

    def _use_of(self, name: str) -> tuple[int, float]:
        return self._policy.num_live(name), self._policy.next_deadline_s(name)

    def _next_turn(self) -> None:
        now_s = self._queue.now_s
        turn = self._policy.next_turn(now_s, self._cost())
        self._turn = turn
        if turn is None:
            return
        delay_s, moved = self._memory.switch_in(turn.model, now_s)
        self.tally.turns += 1
        self.tally.switches += moved > 0
        self.tally.moved_bytes += moved
        self.tally.switch_s += delay_s
        started = Turn(turn.model, turn.quota_s, now_s + delay_s + turn.quota_s)
        self._turn = started
        self._queue.schedule(now_s + delay_s, lambda: self._begin(started))

    def _begin(self, turn: Turn) -> None:
        upcoming = self._policy.upcoming() if self._prefetches else None
        if upcoming is not None and upcoming != turn.model:
            self._memory.prefetch(upcoming, turn.model, self._queue.now_s)
        self._work(turn)

    def _work(self, turn: Turn) -> None:
        """Prefill what waits, then decode; one piece of work, whose end calls again."""
        now_s = self._queue.now_s
        if self._policy.turn_is_over(turn, now_s):
            self._next_turn()
        elif waiting := self._waiting.get(turn.model):
            live = waiting.pop(0)
            prefill_s = self._models[turn.model].latency.prefill_s([live.request.prompt_tokens])
            self.tally.busy_s += prefill_s
            self._queue.schedule(now_s + prefill_s, lambda: self._prefilled(turn, live))
        else:
            self._decode(turn)

    def _prefilled(self, turn: Turn, live: SimLive) -> None:
        self._memory.add_kv(turn.model, live.request.prompt_tokens + 1)
        live.token_times_s.append(self._queue.now_s)
        self._policy.progress(turn.model, live.request.id, 1)
        self._running.setdefault(turn.model, []).append(live)
        self._end_finished(turn.model)
        self._work(turn)

    def _decode(self, turn: Turn) -> None:
        batch = self._running[turn.model]
        context = sum(live.context_tokens for live in batch)
        step_s = self._models[turn.model].latency.decode_step_s(len(batch), context)
        num_steps = min(min(live.num_left for live in batch), _MAX_SEGMENT_STEPS)
        now_s = self._queue.now_s
        if len(self._policy.working_models()) > 1 and math.isfinite(turn.ends_at_s):
            left_s = max(turn.ends_at_s - now_s, 0.0)
            num_steps = min(num_steps, max(1, math.ceil(left_s / step_s)))
        event = self._queue.schedule(now_s + num_steps * step_s, lambda: self._decoded(turn))
        self._segment = _Segment(turn.model, now_s, step_s, num_steps, event)

    def _cut(self, turn: Turn, arrived: str) -> None:
        """End the segment at the first step boundary at which the turn loop would act."""
        segment = self._segment
        assert segment is not None
        now_s = self._queue.now_s
        act_s = now_s if arrived == turn.model else max(now_s, turn.ends_at_s)
        if not math.isfinite(act_s):
            return
        steps = max(1, math.ceil((act_s - segment.start_s) / segment.step_s))
        if steps < segment.num_steps:
            segment.event.cancel()
            segment.num_steps = steps
            at_s = max(now_s, segment.start_s + steps * segment.step_s)
            segment.event = self._queue.schedule(at_s, lambda: self._decoded(turn))

    def _decoded(self, turn: Turn) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        batch = self._running[turn.model]
        times_s = [segment.start_s + (k + 1) * segment.step_s for k in range(segment.num_steps)]
        for live in batch:
            live.token_times_s.extend(times_s)
            self._policy.progress(turn.model, live.request.id, segment.num_steps)
        self._memory.add_kv(turn.model, len(batch) * segment.num_steps)
        self._policy.observe_step(turn.model, segment.step_s)
        self.tally.busy_s += segment.num_steps * segment.step_s
        self._end_finished(turn.model)
        self._work(turn)

    def _end_finished(self, model: str) -> None:
        finished = [live for live in self._running[model] if live.num_left <= 0]
        if not finished:
            return
        self._running[model] = [live for live in self._running[model] if live.num_left > 0]
        for live in finished:
            self._memory.add_kv(model, -live.context_tokens)
            self._policy.finish(model, live.request.id)
            self._on_end(self.number, live)

    def _cost(self) -> SwitchCost:
        names = self._policy.working_models()
        switch_s = {
            n: self._models[n].latency.switch_s(self._memory.missing_bytes(n)) for n in names
        }
        totals = {name: self._memory.total_bytes(name) for name in names}
        full_s = {n: self._models[n].latency.switch_s(total) for n, total in totals.items()}
        return SwitchCost(switch_s, full_s, sum(totals.values()) <= self._capacity_bytes)
