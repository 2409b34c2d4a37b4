"""The simulated device: turns, prefills, decode steps and memory, without a clock.

The device behaves like a worker's turn loop. Future events are in an ``EventQueue`` that
the driver advances: the simulator (:mod:`gpupoold.sim.engine`) in virtual time, a simulated
worker process (``gpupoold.simdevice``) in real time. Orders and requests take effect at the
queue's present time; results are events of the scheduling core.

Decode steps of an unchanged batch form one *segment*. An event to which the turn loop would react
cuts the segment at the next step boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpupoold.domain import Targets
from gpupoold.latency.models import LatencyModel
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Turn
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.clock import EventQueue, Scheduled
from gpupoold.sim.live import DeviceRequests, DeviceTally, SimLive
from gpupoold.sim.memory import MovedBytes, SimMemory

# The core learns of a segment's steps only when the segment ends, so a long segment would let the
# core decide by outdated numbers. Compared with segments of a single step, attainments differ by
# at most half a percentage point.
_SEGMENT_STEPS = 32


@dataclass(frozen=True, slots=True)
class BoxDevice:
    """A device of a box: its memory, and the models that can run there, None for all of the box.

    Devices of one ``kind`` have the same models. ``kv_host_bytes`` is the host memory for KV, None
    for no limit. ``switch_overhead_s`` is added to every switch that loads weights. The weights of
    the ``far`` models are in memory of another NUMA node, and copied at ``far_share`` of the rate.
    """

    num_bytes: int
    models: Mapping[str, SimModel] | None = None
    kind: str = ""
    kv_host_bytes: int | None = None
    prefetches: bool = True
    switch_overhead_s: float = 0.0
    far: frozenset[str] = frozenset()
    far_share: float = 1.0


def on_nodes(
    devices: Sequence[BoxDevice], models: Iterable[str], far_share: float | None
) -> list[BoxDevice]:
    """Return the devices as halves on two NUMA nodes, each with every second model's snapshot.

    ``far_share`` is that of the rate that is left to copies from the other node; None: there is one
    node.
    """
    if far_share is None:
        return list(devices)
    names = sorted(models)
    far = frozenset(names[1::2]), frozenset(names[::2])
    return [
        replace(device, far=far[2 * number >= len(devices)], far_share=far_share)
        for number, device in enumerate(devices)
    ]


class SimDevice:
    """Carries out orders and reports results through ``report``.

    If a step with prefill produces the last token of an answer, only ``Ended`` is reported.
    ``on_switch`` receives the seconds until the model of a turn can run, and the bytes moved for
    the model. ``segment_steps`` is the longest segment in decode steps; with 1 every token is
    reported at the token's own time.
    """

    def __init__(
        self,
        number: int,
        device: BoxDevice,
        queue: EventQueue[Callable[[], None]],
        report: Callable[[e.Event], None],
        *,
        on_switch: Callable[[float, MovedBytes], None] | None = None,
        segment_steps: int = _SEGMENT_STEPS,
    ) -> None:
        self.number = number
        self.models = dict(sorted((device.models or {}).items()))
        self.requests = DeviceRequests()
        self.memory = SimMemory(
            device.num_bytes,
            self.models,
            lambda name: self.requests.use_of(name, self.models[name].targets),
            device.switch_overhead_s,
            device.kv_host_bytes,
            self.requests.recompute,
            dict.fromkeys(device.far, device.far_share),
        )
        self.kv_room = KvRoom(self.requests, self.memory)
        self.tally = DeviceTally()
        self.turn: Turn | None = None
        self.in_step: Sequence[SimLive] = ()
        """The requests of the piece of work under way."""
        self._queue, self._report, self._on_switch = queue, report, on_switch
        self._prefetches, self._segment_steps = device.prefetches, segment_steps
        self._then: str | None = None
        self._replaced_by: tuple[Turn | None, str | None] | None = None
        self._last_turn_id = 0
        self._began_s = self._ends_at_s = 0.0
        self._segment: StepSegment | None = None
        # The end of the piece of work, or of the switch, under way.
        self._piece: Scheduled[Callable[[], None]] | None = None

    def add_model(self, model: SimModel) -> None:
        """Add a model; requests of the model are accepted from then on."""
        self.models[model.name] = model
        self.memory.add(model.name)
        self._report_memory()

    def remove_model(self, name: str) -> list[SimLive]:
        """Remove a model; return the dropped requests."""
        lost = self.requests.all(name)
        self.abort(lost)
        if self.turn is not None and self.turn.model == name:
            if self._piece is not None:
                self._piece.cancel()
            self._segment = None
            self._end_turn()
        self.memory.remove(name)
        del self.models[name]
        return lost

    def set_targets(self, name: str, targets: Targets) -> None:
        """Set the targets of a model, for the order of evictions."""
        self.models[name] = replace(self.models[name], targets=targets)

    def page_out(self, name: str) -> None:
        """Evict the weights of a model without requests."""
        self.memory.evict_weights(name)
        self._report_memory()

    def unbind(self, name: str) -> None:
        """Leave the weights of a model whose engine another takes over in free pages."""
        self.memory.unbind(name)
        self._report_memory()

    def bind(self, name: str) -> None:
        """Map what is left of the weights of a model that takes over an engine."""
        self.memory.bind(name)
        self._report_memory()

    def add(self, live: SimLive) -> None:
        self.requests.waiting[live.request.model].append(live)
        self._note_change(live.request.model)

    def abort(self, lives: Sequence[SimLive]) -> None:
        """Drop requests with their KV."""
        for live in lives:
            self.memory.add_kv(live.request.model, -self._remove(live))
        self._report_memory()

    def release(self, live: SimLive) -> float | None:
        """Release a request; return the time when the KV is in host memory.

        The request keeps the tokens so far; the token of the present step is dropped. Return None
        for a request that leaves without KV: without a complete prefill, or without host memory.
        """
        model = live.request.model
        has_room = self.memory.has_host_room(model, live.context_tokens)
        if live not in self.requests.running[model] or not has_room:
            self.memory.add_kv(model, -self._remove(live))
            return None
        return self.memory.send_kv(model, self._remove(live), self._queue.now_s)

    def attach(self, live: SimLive) -> None:
        """Attach a request with KV in host memory.

        The present model fetches the KV at once, other models with their switch.
        """
        model, now_s = live.request.model, self._queue.now_s
        self.memory.receive_kv(model, live.context_tokens)
        self.requests.attaching.append(live)
        if self.turn is not None and self.turn.model == model and now_s >= self._began_s:
            delay_s, moved = self.memory.switch_in(model, now_s, is_on_turn=True)
            self.tally.moved_bytes += moved
            self.memory.take_moved(model)  # not part of a switch: the model's turn continues
            self._queue.schedule(now_s + delay_s, lambda: self._join(live))
        else:
            self._join(live)
        self._report_memory()

    def attach_without_kv(self, live: SimLive) -> None:
        """Attach a request whose KV is computed anew, from the prompt and the tokens so far."""
        live.num_repeated, live.done_tokens = len(live.token_times_s), 0
        self._report(e.Attached(live.request.id, live.num_tokens))
        self.add(live)

    def plan(self, turn: Turn | None, then: str | None) -> None:
        """Take an order: the present turn and the next model.

        Another turn, or None, ends the present turn after the step under way. An order for an
        ended turn has no effect.
        """
        present = self.turn
        if present is None:
            if turn is not None and turn.turn_id > self._last_turn_id:
                self._start(turn, then)
        elif turn is not None and turn.turn_id == present.turn_id:
            self.turn, self._then = turn, then  # the quota and the chunk size may have changed
            self._ends_at_s = self._began_s + turn.quota_s
            if then is not None:
                self._cut(max(self._queue.now_s, self._ends_at_s))
            self._prefetch(turn.model)
            self._report_memory()
        elif turn is None or turn.turn_id > present.turn_id:
            self._replaced_by = turn, then
            self._cut(self._queue.now_s)

    @property
    def turn_began_s(self) -> float | None:
        """Time when the present model could run; None during the switch and without a turn."""
        is_on = self.turn is not None and self._began_s <= self._queue.now_s
        return self._began_s if is_on else None

    def flush(self, end_s: float) -> None:
        """Record the tokens of a segment cut off by the end of the run."""
        if self._segment is not None:
            times_s = [at_s for at_s in self._segment.token_times_s() if at_s <= end_s]
            for live in self._segment.batch:
                live.token_times_s += times_s

    def check_memory(self) -> None:
        """Raise AssertionError when the bytes of models and requests do not add up."""
        self.memory.check({name: self.requests.kv_tokens(name) for name in self.models})

    # Turns

    def _start(self, turn: Turn, then: str | None) -> None:
        """Make the model of a turn resident; a turn without work ends at once."""
        self.turn, self._then, self._began_s = turn, then, math.inf
        self.tally.turns += 1
        if not self.requests.has_work(turn.model):
            self._end_turn()
            return
        delay_s, moved = self._switch_in(turn)
        self.tally.switches += moved > 0 and self.memory.has_evicted
        if delay_s > 0:
            self._piece = self._queue.schedule(self._began_s, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        """Start a turn once the model is resident; first copy KV attached during the switch."""
        assert self.turn is not None
        if self.requests.has_work(self.turn.model) and self._switch_in(self.turn)[1]:
            self._piece = self._queue.schedule(self._began_s, self._begin)
        else:
            self._prefetch(self.turn.model)
            self._work(is_new=True)

    def _switch_in(self, turn: Turn) -> tuple[float, int]:
        """Make the turn's model resident; return the seconds until then, and the moved bytes."""
        now_s = self._queue.now_s
        delay_s, moved = self.memory.switch_in(turn.model, now_s)
        if moved or self._began_s == math.inf:
            self.tally.moved_bytes += moved
            self.tally.add_switch(now_s, delay_s)
            self._began_s = now_s + delay_s
            self._ends_at_s = self._began_s + turn.quota_s
            if self._on_switch is not None:
                self._on_switch(delay_s, self.memory.take_moved(turn.model))
            self._report_memory()
        return delay_s, moved

    def _prefetch(self, current: str) -> None:
        """Prefetch the next model; ``current`` stays resident."""
        if self._then in self.models and self._prefetches:
            now_s, tally = self._queue.now_s, self.tally
            tally.moved_bytes += self.memory.prefetch(self._then, current, now_s)

    def _end_turn(self) -> None:
        turn, order = self.turn, self._replaced_by
        assert turn is not None
        self._report(e.TurnEnded(self.number, turn.turn_id))
        self.turn = self._then = self._replaced_by = None
        self._last_turn_id, self.in_step = turn.turn_id, ()
        if order is not None:
            self.plan(*order)

    # Pieces of work

    def _work(self, *, is_new: bool = False) -> None:
        """Start the next piece of work: a prefill, or decode steps if no request waits.

        The end of the piece calls ``_work`` again. A new turn does at least one piece, however
        short the quota.
        """
        self._report_memory()  # growing KV may have evicted other models
        turn = self.turn
        assert turn is not None
        waiting = self.kv_room.fitting(turn.model, turn.chunk_tokens)
        self._prefetch(turn.model)  # of more, if memory has become free
        if self._is_over(turn, is_new):
            self._end_turn()
        elif waiting and turn.chunk_tokens is not None:
            self._mix(turn.model, waiting, turn.chunk_tokens)
        elif waiting:
            self._prefill(turn.model, self.requests.waiting[turn.model].pop(0))
        else:
            self._decode(turn.model)

    def _is_over(self, turn: Turn, is_new: bool) -> bool:
        if self._replaced_by is not None or not self.requests.has_work(turn.model):
            return True
        return not is_new and self._then is not None and self._queue.now_s >= self._ends_at_s

    def _run(self, lives: Sequence[SimLive], duration_s: float, end: Callable[[], None]) -> None:
        self.in_step = lives
        self.tally.steps += 1
        self.tally.add_work(self._queue.now_s, duration_s)
        self._piece = self._queue.schedule(self._queue.now_s + duration_s, end)

    def _prefill(self, model: str, live: SimLive) -> None:
        self.requests.prefilling = live
        latency, prompt_tokens = self.models[model].latency, live.prefill_tokens
        copy_s = self._copy_cached(model, [live])
        prefill_s = latency.prefill_s([prompt_tokens])
        if live.done_tokens:  # chunked prefill had begun before the order changed
            left = (live.done_tokens, prompt_tokens - live.done_tokens)
            prefill_s = latency.mixed_step_s([left], 0, 0)
        self._run((live,), copy_s + prefill_s, lambda: self._prefilled(model, live))

    def _copy_cached(self, model: str, lives: Sequence[SimLive]) -> float:
        """Give requests the kept KV of their conversations; return the seconds of the copies.

        The copies take time of their own, though a worker overlaps most of it with steps.
        """
        num_tokens = 0
        for live in lives:
            if live.cached_tokens and not live.done_tokens:
                live.done_tokens = live.cached_tokens
                num_tokens += live.cached_tokens
            live.cached_tokens = 0  # after a preemption all is computed
        if not num_tokens:
            return 0.0
        self.memory.add_kv(model, num_tokens)
        moved = num_tokens * self.models[model].kv_bytes_per_token
        self.tally.moved_bytes += moved
        return moved / self.models[model].latency.switch.bandwidth_bytes_per_s

    def _prefilled(self, model: str, live: SimLive) -> None:
        if self.requests.prefilling is live:  # else the request was dropped during the prefill
            self.requests.prefilling = None
            self.memory.add_kv(model, live.prefill_tokens - live.done_tokens + 1)
            live.done_tokens = live.prefill_tokens
            live.token_times_s.append(self._queue.now_s)
            self.requests.running[model].append(live)
            self._prefill_ended(model, (live,))
        # As an event of its own, so that the core handles the reports first: a request that the
        # core migrates now must not be decoded here.
        self._piece = self._queue.schedule(self._queue.now_s, self._work)

    def _mix(self, model: str, waiting: Sequence[SimLive], chunk_tokens: int) -> None:
        """Run a step that decodes the batch and prefills up to ``chunk_tokens`` in all."""
        batch = list(self.requests.running[model])
        copy_s = self._copy_cached(model, waiting)
        chunks = chunks_of(waiting, chunk_tokens, len(batch))
        step_s = self.models[model].latency.mixed_step_s(
            [(live.done_tokens, num_tokens) for live, num_tokens in chunks],
            len(batch),
            sum(live.context_tokens for live in batch),
        )
        lives = [*batch, *(live for live, _ in chunks)]
        self._run(lives, copy_s + step_s, lambda: self._mixed(model, batch, chunks))

    def _mixed(self, model: str, batch: list[SimLive], chunks: list[tuple[SimLive, int]]) -> None:
        here = set(self.requests.running[model])
        batch = [live for live in batch if live in here]  # some may have migrated during the step
        for live, num_tokens in chunks:
            if live in self.requests.waiting[model]:
                live.done_tokens += num_tokens
                self.memory.add_kv(model, num_tokens)
        batch += self.requests.take_prefilled(model)
        for live in batch:
            live.token_times_s.append(self._queue.now_s)
        self.memory.add_kv(model, len(batch))
        self._prefill_ended(model, batch)
        self._piece = self._queue.schedule(self._queue.now_s, self._work)

    def _prefill_ended(self, model: str, batch: Sequence[SimLive]) -> None:
        """Report a token of each request after a step with prefill."""
        ids = tuple([live.request.id for live in batch if live.num_left])
        if ids:
            self._report(e.Stepped(self.number, model, ids))
        self._end_finished(model)

    def _decode(self, model: str) -> None:
        max_steps = self.kv_room.make(model, self._segment_steps)
        batch = list(self.requests.running[model])
        latency, now_s = self.models[model].latency, self._queue.now_s
        end_s = math.inf if self._then is None else self._ends_at_s
        self._segment = segment_of(batch, latency, now_s, end_s, max_steps)
        self.in_step = batch
        self._piece = self._queue.schedule(self._segment.end_s, self._decoded)

    def _decoded(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None and self.turn is not None
        model, batch, step_s = self.turn.model, segment.batch, segment.step_s
        times_s = segment.token_times_s()
        for live in batch:
            live.token_times_s += times_s
        self.memory.add_kv(model, len(batch) * segment.num_steps)
        if batch:
            ids = tuple([live.request.id for live in batch])
            self._report(e.Stepped(self.number, model, ids, segment.num_steps, step_s))
        self.tally.steps += segment.num_steps
        self.tally.add_work(segment.start_s, segment.num_steps * step_s)
        self._end_finished(model)
        self._work()

    def _note_change(self, model: str) -> None:
        """End the segment at the next step, if the batch of the present model has changed."""
        if self.turn is not None and self.turn.model == model:
            self._cut(self._queue.now_s)

    def _cut(self, act_s: float) -> None:
        """End the segment, if any, at the first step boundary not before ``act_s``."""
        segment = self._segment
        if segment is not None and math.isfinite(act_s) and segment.cut(act_s):
            assert self._piece is not None
            self._piece.cancel()
            at_s = max(self._queue.now_s, segment.end_s)
            self._piece = self._queue.schedule(at_s, self._decoded)

    def _end_finished(self, model: str) -> None:
        for live in self.requests.take_finished(model):
            self.memory.add_kv(model, -live.context_tokens)
            self._report(e.Ended(live.request.id))

    def _join(self, live: SimLive) -> None:
        if live not in self.requests.attaching:
            return  # the request was dropped before the KV arrived
        self.requests.attaching.remove(live)
        self.requests.running[live.request.model].append(live)
        self._report(e.Attached(live.request.id, live.num_tokens))
        self._note_change(live.request.model)

    def _remove(self, live: SimLive) -> int:
        """Remove a request; return the number of its tokens with KV on this device."""
        segment, now_s = self._segment, self._queue.now_s
        if segment is not None and live in segment.batch:
            self.memory.add_kv(live.request.model, segment.leave(live, now_s))
            self._cut(now_s)
        return self.requests.remove(live)

    def _report_memory(self) -> None:
        self.tally.moved_bytes -= self.memory.take_given_up()
        if changes := self.memory.take_changes():
            self._report(e.MemoryChanged(self.number, changes))


class KvRoom:
    """Decides on the requests that a step may contain, and counts preemptions.

    A prompt begins only if all of its KV fits beside the KV of running answers. If the next step's
    KV does not fit, the latest request is preempted: its KV is dropped, and computed anew once
    there is memory. A lone request is never preempted, although its KV may exceed the device: the
    daemon refuses such requests.
    """

    def __init__(self, requests: DeviceRequests, memory: SimMemory) -> None:
        self._requests = requests
        self._memory = memory
        self.num_preemptions = 0

    def fitting(self, model: str, max_tokens: int | None) -> list[SimLive]:
        """Return the first waiting requests whose KV fits beside a step of all answers.

        The requests have at least ``max_tokens`` to prefill together, if as many fit; with None the
        list has at most one request. Without answers the first request always fits.
        """
        waiting, running = self._requests.waiting[model], self._requests.running[model]
        if not waiting:
            return []
        room_tokens = self._memory.kv_room_tokens(model) - len(running)
        found: list[SimLive] = []
        left = 1 if max_tokens is None else max_tokens
        for live in waiting:
            num_tokens = live.prefill_tokens - live.done_tokens
            if left <= 0 or num_tokens + 1 > room_tokens:
                break
            room_tokens -= num_tokens + 1
            left -= num_tokens
            found.append(live)
        return found or ([] if running else waiting[:1])

    def make(self, model: str, max_steps: int) -> int:
        """Preempt until a decode step fits; return how many steps fit, at most ``max_steps``."""
        running = self._requests.running[model]
        while (room_tokens := self._memory.kv_room_tokens(model)) < len(running):
            num_tokens = self._requests.preempt_latest(model)
            if num_tokens is None:
                return max_steps
            self._memory.add_kv(model, -num_tokens)
            self.num_preemptions += 1
        return min(max_steps, room_tokens // len(running))


@dataclass(slots=True)
class StepSegment:
    """Decode steps of an unchanged batch from ``start_s``, equally long."""

    batch: list[SimLive]
    start_s: float
    step_s: float
    num_steps: int

    @property
    def end_s(self) -> float:
        return self.start_s + self.num_steps * self.step_s

    def token_times_s(self) -> list[float]:
        """Return the time of each step."""
        start_s, step_s = self.start_s, self.step_s
        return [start_s + k * step_s for k in range(1, self.num_steps + 1)]

    def leave(self, live: SimLive, now_s: float) -> int:
        """Remove a request; add the tokens of past steps to the request, return the number."""
        self.batch.remove(live)
        past_s = [at_s for at_s in self.token_times_s()[:-1] if at_s <= now_s]
        live.token_times_s += past_s
        return len(past_s)

    def cut(self, act_s: float) -> bool:
        """End at the first step boundary not before ``act_s``; return whether that is earlier."""
        steps = max(1, math.ceil((act_s - self.start_s) / self.step_s))
        if steps >= self.num_steps:
            return False
        self.num_steps = steps
        return True


def segment_of(
    batch: list[SimLive], latency: LatencyModel, now_s: float, end_s: float, max_steps: int
) -> StepSegment:
    """Return a segment from ``now_s`` to the first step boundary not before ``end_s``.

    The segment is shorter if a request ends earlier, or at ``max_steps``.
    """
    size, context, num_steps = len(batch), 0, max_steps
    for live in batch:  # the simulator's innermost loop
        request, num_made = live.request, len(live.token_times_s)
        context += request.prompt_tokens + num_made
        num_left = request.output_tokens - num_made
        if num_left < num_steps:
            num_steps = num_left
    if end_s < math.inf:
        left_s = max(end_s - now_s, 0.0)
        step_s = latency.decode_step_s(size, context)
        num_steps = min(num_steps, max(1, math.ceil(left_s / step_s)))
    # Steps take longer as the context grows, linearly: the duration of the middle step is the mean.
    step_s = latency.decode_step_s(size, context + size * (num_steps - 1) // 2)
    return StepSegment(batch, now_s, step_s, num_steps)


def chunks_of(
    waiting: Iterable[SimLive], chunk_tokens: int, num_running: int
) -> list[tuple[SimLive, int]]:
    """Return the prompts of a step, each with the number of tokens to prefill.

    The oldest prompt comes first, as in vLLM. At least one token is prefilled, because prompts
    would starve where the answers alone fill the step.
    """
    left = max(1, chunk_tokens - num_running)
    chunks: list[tuple[SimLive, int]] = []
    for live in waiting:
        num_tokens = min(left, live.prefill_tokens - live.done_tokens)
        chunks.append((live, num_tokens))
        left -= num_tokens
        if not left:
            break
    return chunks
