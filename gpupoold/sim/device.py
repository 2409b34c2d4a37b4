"""A simulated device: turns, prefills and decode steps in virtual time.

The device behaves like a worker's turn loop. Decode steps of an unchanged batch form one *segment*,
which is cut at the next step boundary when an event occurs to which the turn loop would react.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpupoold.scheduling import events as e
from gpupoold.scheduling.actions import Turn
from gpupoold.scheduling.state import State
from gpupoold.sim.clock import EventQueue, Scheduled
from gpupoold.sim.memory import SimMemory
from gpupoold.sim.model import SimModel
from gpupoold.sim.workloads import SimRequest

# Between its ends the core knows nothing of a segment, so a long one would let it decide by
# what is no longer so; in steps of one the attainments are the same to half a point.
_MAX_SEGMENT_STEPS = 32


@dataclass(slots=True, eq=False)
class SimLive:
    """A request on a device; ``token_times_s`` grow while it is served.

    ``done_tokens`` counts prefilled prompt tokens during chunked prefill.
    """

    request: SimRequest
    token_times_s: list[float] = field(default_factory=list)
    done_tokens: int = 0

    @property
    def num_left(self) -> int:
        return self.request.output_tokens - len(self.token_times_s)

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + len(self.token_times_s)


@dataclass(slots=True)
class _Segment:
    model: str
    batch: list[SimLive]
    start_s: float
    step_s: float
    num_steps: int
    event: Scheduled[Callable[[], None]]

    def token_times_s(self) -> list[float]:
        """Return the time of each step of the segment."""
        start_s, step_s = self.start_s, self.step_s
        return [start_s + k * step_s for k in range(1, self.num_steps + 1)]


@dataclass(slots=True)
class DeviceTally:
    """Counts of a device's work."""

    turns: int = 0
    switches: int = 0
    moved_bytes: int = 0
    switch_s: float = 0.0
    busy_s: float = 0.0


class SimDevice:
    """Carries out the core's actions and reports results through ``tell``."""

    def __init__(
        self,
        number: int,
        models: Mapping[str, SimModel],
        capacity_bytes: int,
        queue: EventQueue[Callable[[], None]],
        tell: Callable[[e.Event], None],
        state: State,
        *,
        prefetches: bool = True,
        switch_overhead_s: float = 0.0,
    ) -> None:
        self.number = number
        self.tally = DeviceTally()
        self._models = models
        self._queue = queue
        self._tell = tell
        self._state = state
        self._prefetches = prefetches
        self._memory = SimMemory(capacity_bytes, models, self._use_of, switch_overhead_s)
        self._waiting: dict[str, list[SimLive]] = {}
        self._running: dict[str, list[SimLive]] = {}
        self._turn: Turn | None = None
        self._began_s = self._ends_at_s = 0.0
        self._then: str | None = None
        self._segment: _Segment | None = None

    def add(self, live: SimLive) -> None:
        model = live.request.model
        self._waiting.setdefault(model, []).append(live)
        if self._segment is not None and self._segment.model == model:
            self._cut(self._queue.now_s)

    def plan(self, turn: Turn | None, then: str | None) -> None:
        self._then = then
        if turn is None:
            return
        if self._turn is None:
            self._start(turn)
        elif turn.turn_id == self._turn.turn_id:
            self._turn = turn  # with another quota, perhaps, and other chunks
            self._ends_at_s = self._began_s + turn.quota_s
            if self._segment is not None and then is not None:
                self._cut(max(self._queue.now_s, self._ends_at_s))
            self._prefetch()

    def give_up(self, live: SimLive) -> float:
        """Release a request with its KV; return the time when the KV is in host memory.

        The request keeps its tokens; the token of the present step is dropped.
        """
        model = live.request.model
        self._running[model].remove(live)
        segment = self._segment
        if segment is not None and live in segment.batch:
            segment.batch.remove(live)
            past_s = [at_s for at_s in segment.token_times_s()[:-1] if at_s <= self._queue.now_s]
            live.token_times_s += past_s
            self._memory.add_kv(model, len(past_s))
            self._cut(self._queue.now_s)
        return self._memory.send_kv(model, live.context_tokens, self._queue.now_s)

    def attach(self, live: SimLive, ready_s: float) -> None:
        """Add a request whose KV is in host memory from ``ready_s``."""
        self._queue.schedule(ready_s, lambda: self._attach(live))

    def flush(self, end_s: float) -> None:
        """Record the tokens of a segment cut off by the end of the run."""
        segment = self._segment
        if segment is None:
            return
        times_s = segment.token_times_s()
        for live in segment.batch:
            live.token_times_s.extend(at_s for at_s in times_s if at_s <= end_s)

    def _attach(self, live: SimLive) -> None:
        """Attach a request: the present model fetches its KV, other models with their switch."""
        model, now_s = live.request.model, self._queue.now_s
        self._memory.receive_kv(model, live.context_tokens)
        if self._turn is not None and self._turn.model == model and now_s >= self._began_s:
            delay_s, moved = self._memory.switch_in(model, now_s)
            self.tally.moved_bytes += moved
            self._queue.schedule(now_s + delay_s, lambda: self._join(live))
        else:
            self._join(live)
        self._tell_memory()

    def _join(self, live: SimLive) -> None:
        model = live.request.model
        self._running.setdefault(model, []).append(live)
        self._tell(e.Attached(live.request.id, len(live.token_times_s)))
        if self._segment is not None and self._segment.model == model:
            self._cut(self._queue.now_s)

    def _use_of(self, name: str) -> tuple[int, float]:
        batch = self._state.devices[self.number].batches[name]
        return len(batch.requests), batch.next_deadline_s()

    def _start(self, turn: Turn) -> None:
        now_s = self._queue.now_s
        self._turn = turn
        delay_s, moved = self._memory.switch_in(turn.model, now_s)
        self.tally.turns += 1
        self.tally.switches += moved > 0
        self.tally.moved_bytes += moved
        self.tally.switch_s += delay_s
        self._began_s = now_s + delay_s
        self._ends_at_s = self._began_s + turn.quota_s
        self._tell_memory()
        if delay_s > 0:
            self._queue.schedule(now_s + delay_s, lambda: self._begin(turn))
        else:
            self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        """Start a turn after the model has come in; later KV follows."""
        now_s = self._queue.now_s
        delay_s, moved = self._memory.switch_in(turn.model, now_s)
        if moved:
            self.tally.moved_bytes += moved
            self.tally.switch_s += delay_s
            self._began_s, self._ends_at_s = now_s + delay_s, now_s + delay_s + turn.quota_s
            self._tell_memory()
            self._queue.schedule(self._began_s, lambda: self._begin(turn))
            return
        self._prefetch()
        self._work(turn, is_new=True)

    def _prefetch(self) -> None:
        """Prefetch the next model, after the present model's own transfers."""
        if self._prefetches and self._turn is not None and self._then is not None:
            moved = self._memory.prefetch(self._then, self._turn.model, self._queue.now_s)
            if moved:
                self.tally.moved_bytes += moved
                self._tell_memory()

    def _work(self, turn: Turn, *, is_new: bool = False) -> None:
        """Prefill waiting requests, then decode; one piece of work, whose end calls again.

        A new turn does at least one piece, however short its quota.
        """
        self._tell_memory()  # KV that grew may have pushed others out
        now_s = self._queue.now_s
        waiting = self._waiting.get(turn.model)
        if self._is_over(turn, now_s, is_new):
            self._turn = None
            self._tell(e.TurnEnded(self.number, turn.turn_id))
        elif waiting and (self._turn or turn).chunk_tokens is not None:
            self._mix(turn, waiting)
        elif waiting:
            live = waiting.pop(0)
            latency, prompt_tokens = self._models[turn.model].latency, live.request.prompt_tokens
            prefill_s = latency.prefill_s([prompt_tokens])
            if live.done_tokens:  # in chunks, until the orders changed
                left = (live.done_tokens, prompt_tokens - live.done_tokens)
                prefill_s = latency.mixed_step_s([left], 0, 0)
            self.tally.busy_s += prefill_s
            self._queue.schedule(now_s + prefill_s, lambda: self._prefilled(turn, live))
        else:
            self._decode(turn)

    def _is_over(self, turn: Turn, now_s: float, is_new: bool) -> bool:
        if not self._waiting.get(turn.model) and not self._running.get(turn.model):
            return True
        return not is_new and self._then is not None and now_s >= self._ends_at_s

    def _prefilled(self, turn: Turn, live: SimLive) -> None:
        model = turn.model
        self._memory.add_kv(model, live.request.prompt_tokens - live.done_tokens + 1)
        live.done_tokens = live.request.prompt_tokens
        live.token_times_s.append(self._queue.now_s)
        self._running.setdefault(model, []).append(live)
        if live.num_left:
            self._tell(e.Stepped(self.number, model, (live.request.id,)))
        self._end_finished(model)
        # After the core has heard: a request that is handed over is not decoded here.
        self._queue.schedule(self._queue.now_s, lambda: self._work(turn))

    def _mix(self, turn: Turn, waiting: list[SimLive]) -> None:
        """Run a step of the batch with as many prompt tokens as permitted.

        The oldest prompt comes first, as in vLLM; at least one token, because prompts would starve
        where the answers alone fill the step.
        """
        assert self._turn is not None
        assert self._turn.chunk_tokens is not None
        batch = list(self._running.get(turn.model, ()))
        left = max(1, self._turn.chunk_tokens - len(batch))
        chunks: list[tuple[SimLive, int]] = []
        for live in waiting:
            num_tokens = min(left, live.request.prompt_tokens - live.done_tokens)
            chunks.append((live, num_tokens))
            left -= num_tokens
            if not left:
                break
        step_s = self._models[turn.model].latency.mixed_step_s(
            [(live.done_tokens, num_tokens) for live, num_tokens in chunks],
            len(batch),
            sum(live.context_tokens for live in batch),
        )
        self.tally.busy_s += step_s
        at_s = self._queue.now_s + step_s
        self._queue.schedule(at_s, lambda: self._mixed(turn, batch, chunks))

    def _mixed(self, turn: Turn, batch: list[SimLive], chunks: list[tuple[SimLive, int]]) -> None:
        model, now_s = turn.model, self._queue.now_s
        here = set(self._running.get(model, ()))
        batch = [live for live in batch if live in here]  # some may have been handed over
        for live, num_tokens in chunks:
            live.done_tokens += num_tokens
            self._memory.add_kv(model, num_tokens)
        ready = [live for live, _ in chunks if live.done_tokens == live.request.prompt_tokens]
        for live in ready:
            self._waiting[model].remove(live)
            self._running.setdefault(model, []).append(live)
        for live in (*batch, *ready):
            live.token_times_s.append(now_s)
        self._memory.add_kv(model, len(batch) + len(ready))
        told = [live for live in batch if live.num_left] + [live for live in ready if live.num_left]
        if told:
            ids = tuple(live.request.id for live in told)
            self._tell(e.Stepped(self.number, model, ids))
        self._end_finished(model)
        self._queue.schedule(now_s, lambda: self._work(turn))

    def _decode(self, turn: Turn) -> None:
        batch = list(self._running[turn.model])
        num_steps = min(min(live.num_left for live in batch), _MAX_SEGMENT_STEPS)
        context = sum(live.context_tokens for live in batch)
        latency = self._models[turn.model].latency
        now_s = self._queue.now_s
        step_s = latency.decode_step_s(len(batch), context)
        if self._then is not None and math.isfinite(self._ends_at_s):
            left_s = max(self._ends_at_s - now_s, 0.0)
            num_steps = min(num_steps, max(1, math.ceil(left_s / step_s)))
        # The steps grow with the context; by their middle one the whole takes what it takes.
        step_s = latency.decode_step_s(len(batch), context + len(batch) * (num_steps - 1) // 2)
        event = self._queue.schedule(now_s + num_steps * step_s, lambda: self._decoded(turn))
        self._segment = _Segment(turn.model, batch, now_s, step_s, num_steps, event)

    def _cut(self, act_s: float) -> None:
        """End the segment at the first step boundary not before ``act_s``."""
        segment, turn = self._segment, self._turn
        assert segment is not None
        assert turn is not None
        if not math.isfinite(act_s):
            return
        steps = max(1, math.ceil((act_s - segment.start_s) / segment.step_s))
        if steps < segment.num_steps:
            segment.event.cancel()
            segment.num_steps = steps
            at_s = max(self._queue.now_s, segment.start_s + steps * segment.step_s)
            segment.event = self._queue.schedule(at_s, lambda: self._decoded(turn))

    def _decoded(self, turn: Turn) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        batch, step_s = segment.batch, segment.step_s
        times_s = segment.token_times_s()
        for live in batch:
            live.token_times_s += times_s
        self._memory.add_kv(turn.model, len(batch) * segment.num_steps)
        ids = tuple(live.request.id for live in batch)
        if ids:
            self._tell(e.Stepped(self.number, turn.model, ids, segment.num_steps, step_s))
        self.tally.busy_s += segment.num_steps * step_s
        self._end_finished(turn.model)
        self._work(turn)

    def _end_finished(self, model: str) -> None:
        finished = [live for live in self._running.get(model, ()) if live.num_left <= 0]
        if not finished:
            return
        self._running[model] = [live for live in self._running[model] if live.num_left > 0]
        for live in finished:
            self._memory.add_kv(model, -live.context_tokens)
            self._tell(e.Ended(live.request.id))

    def _tell_memory(self) -> None:
        changes = self._memory.take_changes()
        if changes:
            self._tell(e.MemoryChanged(self.number, changes))
