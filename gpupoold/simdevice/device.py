"""A device without an engine: turns at the pace of the latency model, in real time.

Behaves like ``gpupoold.sim.device`` in virtual time. All work has absolute times; a late call (on a
busy machine) processes everything due, at the due times, so that tokens are neither lost nor
delayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpupoold.domain import Targets
from gpupoold.sim.memory import SimMemory
from gpupoold.sim.model import SimModel
from gpupoold.simdevice.answers import Answer, Work
from gpupoold.simdevice.step_reports import StepReports
from gpupoold.simdevice.synthetic import Vocabulary
from gpupoold.system.activity import WORKER
from gpupoold.wire import messages as m


class PacedDevice:
    """Orders and requests come in with the present time, messages go out through ``send``.

    ``advance`` must be called at ``next_due_s`` or soon after, and before and after orders
    and requests.
    """

    def __init__(
        self, device_number: int, capacity_bytes: int, send: Callable[[m.Message], None]
    ) -> None:
        self.device_number = device_number
        self.num_steps = 0
        self.models: dict[str, SimModel] = {}
        self.memory = SimMemory(capacity_bytes, self.models, self._use_of)
        self._send_now = send
        self._work: dict[str, Work] = {}
        self._reports = StepReports(send, lambda model: self._work[model].vocabulary)
        self._due: tuple[float, Callable[[float], None]] | None = None
        self._now_s = 0.0
        self._turn: m.RunTurn | None = None
        self._began_s = math.inf
        self._has_begun = False
        self._order: m.RunTurn | m.EndTurn | None = None  # for when the turn under way has ended
        self._last_turn_id = 0
        self._previous: str | None = None
        # Weight and KV bytes that came before the turn they came for.
        self._fetched: dict[str, tuple[int, int]] = {}
        self._fetched_beside: set[str] = set()  # during the turn of another

    @property
    def next_due_s(self) -> float | None:
        """Time of the next work."""
        return self._due[0] if self._due else None

    @property
    def turn(self) -> m.RunTurn | None:
        return self._turn

    @property
    def turn_began_s(self) -> float | None:
        """Time when the present model could run; None while it is brought in."""
        return self._began_s if self._turn is not None and self._has_begun else None

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of prefetched weights, arrived or on the way, for coming turns."""
        held = ((self.memory.held_bytes(name)[0], early) for name, early in self._fetched.items())
        return sum(min(held_bytes, weight_bytes) for held_bytes, (weight_bytes, _) in held)

    def page_out(self, name: str) -> None:
        """Take a model without requests off the device."""
        self.memory.evict_weights(name)
        self._fetched.pop(name, None)
        self._tell_memory()

    def advance(self, now_s: float) -> None:
        """Process everything due by ``now_s``, and report the results."""
        self._now_s = now_s
        while self._due is not None and self._due[0] <= now_s:
            (at_s, work), self._due = self._due, None
            work(at_s)
        self._reports.close(self._now_s)

    def add_model(self, model: SimModel, vocabulary: Vocabulary) -> None:
        """Add a model, which can then have requests."""
        self.models[model.name] = model
        self._work[model.name] = Work(vocabulary)
        self.memory.add(model.name)
        self._tell_memory()

    def remove_model(self, name: str) -> list[str]:
        """Remove a model; return the ids of its live requests."""
        lost = [answer.request_id for answer in self._work[name].all()]
        self.abort(name, lost)
        if self._turn is not None and self._turn.model == name:
            self._due = None
            self._end_turn(self._now_s)
        self.memory.remove(name)
        del self.models[name], self._work[name]
        self._fetched.pop(name, None)
        self._fetched_beside.discard(name)
        return lost

    def set_targets(self, name: str, targets: Targets) -> None:
        """New targets, for the order of evictions."""
        self.models[name] = replace(self.models[name], targets=targets)

    def add(self, answer: Answer) -> None:
        """Add a request of a present model."""
        self._work[answer.model].waiting.append(answer)

    def abort(self, model: str, request_ids: Iterable[str]) -> None:
        """Drop requests with their KV; ignore unknown ids."""
        wanted, work = set(request_ids), self._work[model]
        for answer in work.all():
            if answer.request_id in wanted:
                self._drop(work, answer)
        self._tell_memory()

    def give_up(self, model: str, request_id: str) -> tuple[Answer, float] | None:
        """Release a request; return it with the time when its KV is in host memory, or None."""
        work = self._work[model]
        answer = next((one for one in work.all() if one.request_id == request_id), None)
        if answer is None:
            return None
        has_kv = answer in work.running
        answer.is_gone = True
        ready_s = self._now_s
        if has_kv:
            work.running.remove(answer)
            work.batch = None
            ready_s = self.memory.send_kv(model, answer.context_tokens, self._now_s)
        elif answer in work.waiting:
            work.waiting.remove(answer)
        self._tell_memory()
        return answer, ready_s

    def attach(self, answer: Answer) -> float:
        """Attach a request with KV in host memory; return the time for ``join``.

        The present model fetches the KV at once, other models with their switch.
        """
        self.memory.receive_kv(answer.model, answer.context_tokens)
        delay_s = 0.0
        if self._turn is not None and self._turn.model == answer.model and self._has_begun:
            delay_s, _ = self.memory.switch_in(answer.model, self._now_s)
        self._tell_memory()
        return self._now_s + delay_s

    def join(self, answer: Answer) -> None:
        """Start decoding an attached request."""
        work = self._work[answer.model]
        work.running.append(answer)
        work.batch = None

    def drop_taken(self, answer: Answer) -> None:
        """Drop an attached request that ended before decoding."""
        self.memory.add_kv(answer.model, -answer.context_tokens)
        self._tell_memory()

    def run_turn(self, order: m.RunTurn) -> None:
        turn = self._turn
        if turn is not None and order.turn_id == turn.turn_id:
            self._turn = order
            if self._has_begun:
                self._prefetch()
            self._tell_memory()
        elif turn is not None and order.turn_id > turn.turn_id:
            self._order = order
        elif turn is None and order.turn_id > self._last_turn_id:
            self._start(order, self._now_s)

    def end_turn(self) -> None:
        """End the present turn, if any, after its step."""
        if self._turn is not None:
            self._order = m.EndTurn()

    def counts(self, model: str) -> tuple[int, int]:
        """Return a model's number of requests, and of those without a token."""
        work = self._work[model]
        num_waiting = len(work.waiting) + (work.prefilling is not None)
        return num_waiting + len(work.running), num_waiting

    def live(self, model: str) -> list[Answer]:
        """All requests of a model."""
        return self._work[model].all()

    # Turns

    def _start(self, order: m.RunTurn, at_s: float) -> None:
        """Start the switch of a turn; a turn without work ends at once."""
        self._turn, self._has_begun = order, False
        model = order.model
        if model not in self.models or not self._work[model].all():
            self._end_turn(at_s)
            return
        delay_s = self._switch_in(model, at_s)
        self._began_s = at_s + delay_s
        self._tell_memory()
        self._due = self._began_s, self._begin

    def _begin(self, at_s: float) -> None:
        self._has_begun = True
        self._prefetch()
        self._go_on(at_s, is_new=True)

    def _go_on(self, at_s: float, *, is_new: bool = False) -> None:
        """Prefill waiting requests, then decode; one piece of work, whose end calls again.

        A new turn does at least one piece, however short its quota.
        """
        assert self._turn is not None
        self._tell_memory()  # KV that grew may have pushed others out
        work = self._work[self._turn.model]
        if self._is_over(work, at_s, is_new):
            self._end_turn(at_s)
        elif work.waiting:
            answer = work.prefilling = work.waiting.pop(0)
            WORKER.begin_step(answer.model, [answer.request_id])
            WORKER.end_steps(num_under_way=1)
            latency = self.models[answer.model].latency
            prefill_s = latency.prefill_s([answer.context_tokens])
            self._due = at_s + prefill_s, functools.partial(self._prefilled, answer)
        else:
            self._decode(self._turn.model, work, at_s)

    def _is_over(self, work: Work, at_s: float, is_new: bool) -> bool:
        if self._order is not None or not (work.waiting or work.running):
            return True
        turn = self._turn
        assert turn is not None
        return not is_new and turn.then is not None and at_s >= self._began_s + turn.quota_s

    def _end_turn(self, at_s: float) -> None:
        """Report the end of the turn, and bring in the next model without waiting for orders."""
        turn, order = self._turn, self._order
        assert turn is not None
        self._turn = self._order = None
        WORKER.end_steps()
        self._last_turn_id = max(self._last_turn_id, turn.turn_id)
        if order is None and turn.then in self.models:
            self._fetch(turn.then, turn.then, at_s)
        changed = dict(self.memory.take_changes())
        began_s = self._began_s if self._has_begun else None
        self._send(m.TurnReport(turn.turn_id, turn.model, began_s, at_s, changed))
        if isinstance(order, m.RunTurn):
            self._start(order, at_s)

    # Steps

    def _prefilled(self, answer: Answer, at_s: float) -> None:
        work = self._work[answer.model]
        work.prefilling = None
        if not answer.is_gone:
            self.num_steps += 1
            answer.num_tokens += 1
            self.memory.add_kv(answer.model, answer.context_tokens)
            work.running.append(answer)
            work.batch = None
            self._reports.note(answer.model, (answer,), None, self._now_s)
            self._end_finished(work, (answer,))
        self._go_on(at_s)

    def _decode(self, model: str, work: Work, at_s: float) -> None:
        batch = work.batch = work.batch or tuple(work.running)
        WORKER.begin_step(model, [answer.request_id for answer in batch])
        WORKER.end_steps(num_under_way=1)
        context = sum(answer.context_tokens for answer in batch)
        step_s = self.models[model].latency.decode_step_s(len(batch), context)
        self._due = at_s + step_s, functools.partial(self._decoded, model, batch, step_s)

    def _decoded(self, model: str, batch: tuple[Answer, ...], step_s: float, at_s: float) -> None:
        work = self._work[model]
        if work.batch is not batch:  # some were aborted during the step
            batch = tuple(answer for answer in batch if not answer.is_gone)
        self.num_steps += 1
        is_any_done = False
        for answer in batch:
            answer.num_tokens += 1
            is_any_done = is_any_done or answer.is_done
        if batch:
            self.memory.add_kv(model, len(batch))
            self._reports.note(model, batch, step_s, self._now_s)
        if is_any_done:
            self._end_finished(work, batch)
        self._go_on(at_s)

    def _end_finished(self, work: Work, batch: Iterable[Answer]) -> None:
        if any(answer.is_done for answer in batch):
            self._reports.close(self._now_s)
        for answer in batch:
            if answer.is_done:
                self._drop(work, answer)

    def _drop(self, work: Work, answer: Answer) -> None:
        answer.is_gone = True
        if answer in work.running:
            work.running.remove(answer)
            work.batch = None
            self.memory.add_kv(answer.model, -answer.context_tokens)
        elif answer in work.waiting:
            work.waiting.remove(answer)

    # Memory

    def _prefetch(self) -> None:
        """Bring in the next model during this turn."""
        turn = self._turn
        if turn is not None and turn.then in self.models:
            self._fetch(turn.then, turn.model, self._now_s)

    def _fetch(self, name: str, current: str, at_s: float) -> None:
        missing = self._missing(name)
        if self.memory.prefetch(name, current, at_s):
            self._fetched[name] = missing
            if name != current:
                self._fetched_beside.add(name)

    def _missing(self, name: str) -> tuple[int, int]:
        """Return the bytes of weights and KV that a switch to the model would move."""
        held_weight_bytes, _, kv_host_bytes = self.memory.held_bytes(name)
        return self.models[name].weight_bytes - held_weight_bytes, kv_host_bytes

    def _switch_in(self, name: str, at_s: float) -> float:
        """Return the seconds until the model can run; report the switch, if any."""
        early, late = self._fetched.pop(name, (0, 0)), self._missing(name)
        prefetched_bytes = early[0] if name in self._fetched_beside else 0
        self._fetched_beside.discard(name)
        delay_s, moved = self.memory.switch_in(name, at_s)
        weight_bytes, kv_bytes = early[0] + late[0], early[1] + late[1]
        if weight_bytes or kv_bytes:
            out_bytes = max(0, moved - sum(late))
            self._tell_switch(
                name, at_s, delay_s, weight_bytes, kv_bytes, out_bytes, prefetched_bytes
            )
        self._previous = name
        return delay_s

    def _tell_switch(
        self,
        name: str,
        at_s: float,
        total_s: float,
        weight_bytes: int,
        in_bytes: int,
        out: int,
        prefetched_bytes: int,
    ) -> None:
        moved = max(1, weight_bytes + in_bytes + out)
        record = m.SwitchRecord(
            device=self.device_number,
            model=name,
            previous=self._previous,
            at_s=at_s,
            total_s=total_s,
            evict_s=total_s * out / moved,
            map_s=0.0,
            weights_s=total_s * weight_bytes / moved,
            kv_s=total_s * in_bytes / moved,
            weight_bytes=weight_bytes - prefetched_bytes,
            kv_in_bytes=in_bytes,
            kv_out_bytes=out,
            prefetched_bytes=prefetched_bytes,
        )
        self._send(m.Switched(record))

    def _use_of(self, name: str) -> tuple[int, float]:
        targets = self.models[name].targets
        answers = self._work[name].all()
        due_s = (targets.deadline_s(one.arrival_s, one.num_tokens) for one in answers)
        return len(answers), min(due_s, default=math.inf)

    # Telling

    def _tell_memory(self) -> None:
        changes = self.memory.take_changes()
        if changes:
            self._send(m.MemoryReport(dict(changes)))

    def _send(self, message: m.Message) -> None:
        self._reports.close(self._now_s)
        self._send_now(message)
