"""The simulated device in real time: messages in and out.

The model of the device is :class:`gpupoold.sim.device.SimDevice`. If a call comes late (on a busy
machine), all due work is processed with the times when due, so tokens are neither lost nor delayed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Turn
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.clock import EventQueue
from gpupoold.sim.device import BoxDevice, SimDevice
from gpupoold.sim.live import SimLive
from gpupoold.sim.memory import MovedBytes
from gpupoold.simdevice.models import Vocabulary, seed_of
from gpupoold.system.activity import WORKER
from gpupoold.wire import messages as m

LENGTH = "length"


class PacedDevice:
    """A device driven by the caller's clock; messages to the daemon go through ``send``.

    Orders and requests take effect at the time of the last ``advance``. Call ``advance`` at
    ``next_due_s`` or soon after, and before and after orders and requests.
    """

    def __init__(
        self,
        device_number: int,
        capacity_bytes: int,
        send: Callable[..., None],
        kv_host_bytes: int | None = None,
    ) -> None:
        """``kv_host_bytes`` is the host memory for KV, None for no limit."""
        self._queue: EventQueue[Callable[[], None]] = EventQueue()
        self.sim = SimDevice(
            device_number,
            BoxDevice(capacity_bytes, kv_host_bytes=kv_host_bytes),
            self._queue,
            self._forward,
            on_switch=self._switched,
            segment_steps=1,
        )
        self._now_s = 0.0  # later than the time of the queue while late work is processed
        self._send_now = send
        self._vocabularies: dict[str, Vocabulary] = {}
        self._reports = StepReports(send, self._vocabularies)
        self._lives: dict[str, SimLive] = {}
        self._previous: str | None = None  # the model of the last switch
        self._transfer_numbers = itertools.count()
        self._in_step: Sequence[SimLive] = ()

    @property
    def next_due_s(self) -> float | None:
        """Time of the next work."""
        return self._queue.next_at_s

    def advance(self, now_s: float) -> None:
        """Process all work due by ``now_s``, and report the results."""
        self._now_s = max(now_s, self._now_s)
        while (at_s := self._queue.next_at_s) is not None and at_s <= self._now_s:
            due = self._queue.pop()
            assert due is not None
            due.event()
        self._queue.advance_to(self._now_s)
        self._write_activity()
        self._reports.close(self._now_s)

    # Models and requests

    def add_model(self, model: SimModel, vocabulary: Vocabulary) -> None:
        """Add a model; requests of the model are accepted from then on."""
        self._vocabularies[model.name] = vocabulary
        self.sim.add_model(model)

    def remove_model(self, name: str) -> list[str]:
        """Remove a model; return the ids of its live requests."""
        lost = [live.request.id for live in self.sim.remove_model(name)]
        for request_id in lost:
            del self._lives[request_id]
        del self._vocabularies[name]
        return lost

    def add(self, live: SimLive) -> None:
        """Add a request of a present model, to be prefilled."""
        self._lives[live.request.id] = live
        self.sim.add(live)

    def add_migrated(self, live: SimLive, kv_transfer: m.KvTransfer | None) -> None:
        """Add a request from another device; without ``kv_transfer`` the prefill is repeated."""
        if kv_transfer is None:
            self.add(live)
            self._send(m.RequestAttached(live.request.model, live.request.id))
        else:
            self._lives[live.request.id] = live
            self._send(m.KvTransferUsed(kv_transfer.transfer_id, kv_transfer.source))
            self.sim.attach(live)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests with their KV; ignore unknown ids."""
        lives = [
            self._lives.pop(request_id) for request_id in request_ids if request_id in self._lives
        ]
        self.sim.abort(lives)

    def migrate_out(self, message: m.MigrateOut) -> None:
        """Release a request; send ``Migrated`` when the KV is in host memory."""
        model, request_id = message.model, message.request_id
        live = self._lives.pop(request_id, None)
        if live is None:
            self._send(m.Migrated(model, request_id, is_known=False))
            return
        ready_s = self.sim.release(live)
        if ready_s is None:
            self._send(m.Migrated(model, request_id))
            return
        transfer_id = f"{os.getpid()}-{next(self._transfer_numbers)}"
        kv_transfer = m.KvTransfer(
            transfer_id, self.sim.number, live.context_tokens, [], live.context_tokens
        )
        moved = m.Migrated(model, request_id, True, kv_transfer)
        self._queue.schedule(ready_s, lambda: self._send_kv(moved))

    # Orders

    def run_turn(self, order: m.RunTurn) -> None:
        turn = Turn(order.turn_id, order.model, order.quota_s, order.chunk_tokens)
        self.sim.plan(turn, order.then)

    def end_turn(self) -> None:
        """End the present turn, if any, after its step."""
        self.sim.plan(None, None)

    # Results of the device

    def _forward(self, event: e.Event) -> None:
        match event:
            case e.Stepped():
                batch = [self._lives[request_id] for request_id in event.request_ids]
                self._reports.note(event.model, batch, event.step_s, self._now_s)
            case e.Ended():
                self._reports.end(self._lives.pop(event.request_id), self._now_s)
            case e.Attached():
                live = self._lives[event.request_id]
                self._send(m.RequestAttached(live.request.model, live.request.id))
            case e.MemoryChanged():
                self._send(m.MemoryReport(dict(event.missing_bytes)))
            case e.TurnEnded():
                self._turn_ended()

    def _turn_ended(self) -> None:
        turn, began_s = self.sim.turn, self.sim.turn_began_s
        assert turn is not None
        changed = dict(self.sim.memory.take_changes())
        self._in_step = ()
        WORKER.end_steps()
        self._send(m.TurnReport(turn.turn_id, turn.model, began_s, self._queue.now_s, changed))

    def _switched(self, total_s: float, moved: MovedBytes) -> None:
        """Send the record of a switch, unless no bytes moved to the device."""
        assert self.sim.turn is not None
        previous, self._previous = self._previous, self.sim.turn.model
        if not moved.weights and not moved.kv_in:
            return
        s_per_byte = total_s / (moved.weights + moved.kv_in + moved.kv_out)
        record = m.SwitchRecord(
            at=time.time() - self._now_s + self._queue.now_s,
            device=self.sim.number,
            model=self.sim.turn.model,
            previous=previous,
            at_s=self._queue.now_s,
            total_s=total_s,
            evict_s=s_per_byte * moved.kv_out,
            map_s=0.0,
            weights_s=s_per_byte * moved.weights,
            kv_s=s_per_byte * moved.kv_in,
            weight_bytes=moved.weights - moved.prefetched,
            kv_in_bytes=moved.kv_in,
            kv_out_bytes=moved.kv_out,
            prefetched_bytes=moved.prefetched,
        )
        self._send(m.Switched(record))

    # Messages

    def _send(self, message: m.Message) -> None:
        self._reports.close(self._now_s)
        self._send_now(message)

    def _send_kv(self, moved: m.Migrated) -> None:
        """Send ``Migrated`` with an eventfd, already set because the KV is complete."""
        self._reports.close(self._now_s)
        fd = os.eventfd(1, os.EFD_CLOEXEC)
        try:
            self._send_now(moved, (fd,))
        finally:
            os.close(fd)

    def _write_activity(self) -> None:
        lives = self.sim.in_step
        if lives is self._in_step:
            return
        self._in_step = lives
        if lives:
            WORKER.begin_step(lives[0].request.model, [live.request.id for live in lives])
        WORKER.end_steps(num_under_way=1 if lives else 0)


@dataclass(slots=True)
class _Steps:
    """Unreported steps of one batch; ``starts`` are the numbers of tokens before the steps."""

    model: str
    batch: list[SimLive]
    starts: list[int]
    num_steps: int
    step_s: float | None


@dataclass(eq=False, slots=True)
class StepReports:
    """Collects steps and reports them when the batch changes, or at ``close``."""

    send: Callable[[m.Message], None]
    vocabularies: Mapping[str, Vocabulary]
    _steps: _Steps | None = field(default=None, init=False)

    def note(self, model: str, batch: list[SimLive], step_s: float | None, now_s: float) -> None:
        """Add a step with a token for each request; ``step_s`` is None for a prefill."""
        steps = self._steps
        is_decode = step_s is not None and steps is not None and steps.step_s is not None
        if steps is not None and is_decode and steps.batch == batch:
            steps.num_steps += 1
            steps.step_s = step_s
            return
        self.close(now_s)
        self._steps = _Steps(model, batch, [request.num_tokens - 1 for request in batch], 1, step_s)

    def end(self, live: SimLive, now_s: float) -> None:
        """Report the end of a request, unless the collected steps already contain the end."""
        if self._steps is None or live not in self._steps.batch:
            self.note(live.request.model, [live], None, now_s)

    def close(self, now_s: float) -> None:
        """Report the collected steps."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        vocabulary, num_steps = self.vocabularies[steps.model], steps.num_steps
        progress = [
            m.RequestProgress(
                request.request.id,
                vocabulary.token_ids(seed_of(request.request.id), start, num_steps),
                LENGTH
                if start + num_steps - request.num_before >= request.request.output_tokens
                else None,
            )
            for request, start in zip(steps.batch, steps.starts, strict=True)
        ]
        self.send(m.StepOutputs(steps.model, now_s, [], progress, steps.step_s))
