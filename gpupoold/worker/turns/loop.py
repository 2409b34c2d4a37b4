"""The worker's serving thread: messages in, turns, steps, outputs out."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpupoold.domain import DeviceActivity, Targets
from gpupoold.errors import NoSuchModel
from gpupoold.memory.host import Slot
from gpupoold.memory.pages import OutOfPages
from gpupoold.memory.transfers import Arrival
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.system.process import set_log_level
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel
from gpupoold.worker.device import DriverMemory
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.threads import HEAP, TurnThread
from gpupoold.worker.turns.loads import EngineLoader, LoadEnd, LoadOrder, LoadQueue
from gpupoold.worker.turns.models import KEPT_S, DeviceModels, WorkerDevice
from gpupoold.worker.turns.requests import (
    KvMigrations,
    Orders,
    RequestLedger,
    TurnRequests,
    TurnSteps,
    may_come_between,
)
from gpupoold.worker.turns.self_check import SelfChecks

_logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 0.25
# Time between two steps for jobs of other threads, and without a resident model on turn.
_JOBS_S, _JOBS_ALONE_S = 0.02, 0.1
_SLICE_LIMIT_S = 0.06
# Jobs wait at most so long for streams that are behind their deadlines.
_MAX_PUT_OFF_S = 0.25
_SNAPSHOTS_POLL_S = 0.005
_CALM_S = 1.0  # without work, before work that can wait


class TurnLoop:
    """Owns the device while the process runs; the daemon's core decides on turns."""

    def __init__(
        self,
        own: WorkerDevice,
        channel: BlockingChannel[m.ToWorker],
        answer_call: Callable[[TurnLoop, m.Call], m.CallResult | None],
    ) -> None:
        self.own = own
        device, host = own.device, own.host
        self.ledger = RequestLedger(self._num_tokens)
        self.steps = TurnSteps(self.ledger, channel.send)
        self.residency = Residency(
            device, own.pool, host, own.bandwidth_bytes_per_s, self._use, own.number
        )
        self.engines: dict[str, ModelEngine] = {}
        self.turns = TurnThread(self._slice_limit_s, self._maybe_report)
        self.driver_memory = DriverMemory(device, has_gpu_alone=own.has_gpu_alone)
        loader = EngineLoader(
            device,
            host,
            self.residency,
            self.turns,
            self.driver_memory,
            self._model_on_turn,
            own.links,
            own.prefixes,
        )
        self._self_checks = SelfChecks()
        self._readers = ThreadPoolExecutor(1, "files")
        self.migrations = KvMigrations(own.number, device, host, channel.send)
        self._requests = TurnRequests(
            own.number,
            self.engines,
            self.ledger,
            self.migrations,
            self.residency,
            channel.send,
            lambda: bool(self.loads.is_busy),
        )
        self._models = DeviceModels(
            own,
            self.engines,
            self.ledger,
            self.residency,
            self._self_checks,
            channel.send,
            self._requests.abort,
        )
        self.loads = LoadQueue(loader, self._begin_load, self._end_load)
        self._channel = channel
        self._answer_call = answer_call
        self.orders = Orders()
        self._missing_bytes: dict[str, int] = {}  # as last reported to the daemon
        self.previous: str | None = None
        self._prefetching_for: str | None = None
        self._status_at_s = self._last_jobs_s = 0.0
        self._busy_s = -math.inf
        self._interrupted = self._stopping = self._waits_for_load = False

    def run(self) -> None:
        """Serve until ``Shutdown`` arrives.

        Raises:
            ChannelClosed: the daemon has closed the connection.
        """
        while not self._stopping:
            has_work = self.orders.turn is not None or self.turns.has_jobs
            self._receive(0.0 if has_work else _STATUS_INTERVAL_S)
            if self.orders.turn is not None:
                self._run_turn(self.orders.turn.turn_id, self.orders.turn.model)
                self._busy_s = time.monotonic()
            else:
                self.residency.eviction.settle_exports()  # during turns, `advance` does
                is_idle = self.ledger.is_idle()
                self.turns.run(_JOBS_ALONE_S if is_idle else _JOBS_S)
                has_jobs = self.loads.is_busy or self.turns.has_jobs
                self._use_calm(time.monotonic(), is_idle=is_idle and not has_jobs)

    def _use_calm(self, now_s: float, *, is_idle: bool) -> None:
        """Collect garbage and capture a further size of graphs after some time without work.

        Messages are read between two sizes, so a request waits for one at most.
        """
        if not is_idle:
            self._busy_s = now_s
        elif now_s - self._busy_s > _CALM_S:
            HEAP.collect()
            self._models.capture_graphs()

    def switch_to(self, name: str) -> m.SwitchRecord | None:
        """Make a model resident and report the switch, unless the model is resident."""
        before = self.engines.get(self.previous or "")
        if before is not None and name != self.previous:
            before.drop_encoder_outputs()
        with WORKER.main.doing(ThreadPhase.SWITCH, name):
            record = self.residency.switch_in(name, self.previous)
        # No switch if the same model continues while the last KV arrives.
        if record is not None and (name != self.previous or record.moved_bytes):
            self._channel.send(m.Switched(record, self.residency.loads.bandwidth_bytes_per_s))
            if record.weight_bytes or record.prefetched_bytes:
                self._self_checks.moved(name)
        self.previous = name
        self._models.last_used_s[name] = time.monotonic()
        return record

    def engine(self, name: str) -> ModelEngine:
        """Return a loaded model's engine.

        Raises:
            NoSuchModel: the model is not loaded here.
        """
        if name not in self.engines:
            raise NoSuchModel(f"{name} is not loaded on worker {self.own.number}")
        return self.engines[name]

    def run_beside(self, answer: Callable[[], m.CallResult]) -> None:
        """Run ``answer`` on another thread, after earlier ones, and send its result."""
        self._readers.submit(lambda: self.turns.call(self._channel.send, answer()))

    def interrupt_turn(self) -> None:
        """Make the present turn's model resident again, because residency has changed."""
        self._interrupted = True

    def _run_turn(self, turn_id: int, model: str) -> None:
        """Switch the model in, then step until the turn is over or interrupted."""
        self._interrupted = False
        if not self._can_run(model):
            self._end_turn()
            return
        engine = self.engines[model]
        self._waits_for_load = False
        try:
            if not self._has_room(model):
                self._wait_for_load(turn_id)
                return
            self.switch_to(model)
        except OutOfPages as error:
            if self.loads.is_busy:
                self._wait_for_load(turn_id)
                return
            self._requests.fail_all(model, f"{model} does not fit on the device: {error}")
            self._end_turn()
            return
        if self._self_checks.is_due(model) and not self._is_right(engine):
            self._end_turn()
            return
        self.orders.began(time.monotonic())
        self._prefetching_for = None
        self._report_memory()
        is_over = self._run_steps(turn_id, engine)
        self.steps.settle()
        if self.engines.get(model) is engine:  # a model may be unloaded during its turn
            self.residency.save_prefixes(model)
        if not is_over:
            return
        self._models.last_used_s[model] = time.monotonic()
        if self.orders.turn is not None and self.orders.turn.turn_id == turn_id:
            self._end_turn()

    def _run_steps(self, turn_id: int, engine: ModelEngine) -> bool:
        """Step a resident model; return False if the turn was interrupted before its end."""
        while self.ledger.num_live(engine.name):
            self.residency.advance(engine.name)
            self._prefetch(engine.name)
            if not engine.kv.is_whole and not engine.is_ready():
                self.residency.wait_ready(engine.name)
            if engine.waits_for_prefixes:
                self._receive(_STATUS_INTERVAL_S)
            else:
                self._step(engine)
                self._receive()
            self._run_jobs(engine.name)
            turn = self.orders.turn
            if turn is None or turn.turn_id != turn_id:
                break
            if self._stopping or self._interrupted or not self._can_run(engine.name):
                return False
            if self.orders.is_quota_used(time.monotonic()):
                break
        return True

    def _has_room(self, model: str) -> bool:
        """Return whether a model fits on the device beside the pages of a load."""
        return not self.loads.is_busy or self.residency.has_room(model)

    def _wait_for_load(self, turn_id: int) -> None:
        """Wait for a load that has the pages of the present turn's model.

        Waits for a part of the load and lets the turn begin again, or ends the turn if another
        model waits.
        """
        self._waits_for_load = True
        self._report_memory()
        self.turns.run(_JOBS_ALONE_S if self.orders.then is None else _JOBS_S)
        if not self.turns.has_jobs:
            self._receive(_STATUS_INTERVAL_S if self.orders.then is None else _JOBS_S)
        turn = self.orders.turn
        if turn is not None and turn.turn_id == turn_id and self.orders.then is not None:
            self._end_turn()

    def _run_jobs(self, model: str) -> None:
        """Run jobs of other threads between two steps of a model, for a limited time."""
        if not self.turns.has_jobs:
            return
        now_s = time.monotonic()
        slack_s = self.ledger.next_deadline_of_all_s() - now_s
        if slack_s < _SLICE_LIMIT_S and now_s - self._last_jobs_s < _MAX_PUT_OFF_S:
            return
        self.steps.settle()
        self.turns.run(_JOBS_S)
        if model not in self.engines or not self.residency.can_step(model):
            self.turns.run(_JOBS_ALONE_S)  # further slices need no further eviction
            self.interrupt_turn()
        self._last_jobs_s = time.monotonic()

    def _slice_limit_s(self) -> float:
        """Return the longest time that other models may be kept from their steps, in seconds."""
        return math.inf if self.ledger.is_idle() else _SLICE_LIMIT_S

    def _model_on_turn(self) -> str | None:
        turn = self.orders.turn
        return turn.model if turn is not None and turn.model in self.engines else None

    def _is_right(self, engine: ModelEngine) -> bool:
        """Return whether a model passes its self-check; otherwise its requests end."""
        with WORKER.main.doing(ThreadPhase.SELF_CHECK, engine.name):
            wrong = self._self_checks.check(engine, self.residency)
        if wrong is None:
            return True
        text = "%s: the self-check returned %s instead of %s"
        _logger.error(text, engine.name, wrong.answered, wrong.expected)
        self._forget_prefixes(engine.info.name)  # the KV may be wrong too
        if engine.prefixes is not None:
            engine.prefixes.close()
        self._requests.fail_all(
            engine.name, f"the weights of {engine.name} are damaged and are reloaded"
        )
        self._channel.send(m.WrongAnswer(engine.name, wrong.expected, wrong.answered))
        return False

    def _prefetch(self, current: str) -> None:
        """Prefetch the next model during the current one's steps; restart for another model."""
        then = self.orders.then
        if then == self._prefetching_for:
            return
        self._prefetching_for = then
        if then is None or not self._can_run_now(then):
            self.residency.stop_prefetch()
        else:
            self.residency.prefetch(then, current)
            self._report_memory()

    def _end_turn(self) -> None:
        """Report the end of the turn; switch to the next model before the daemon's answer."""
        assert self.orders.turn is not None
        model, began_s = self.orders.turn.model, self.orders.began_s
        turn_id, then = self.orders.end()
        ended = m.TurnReport(
            turn_id, model, began_s, time.monotonic(), self._changed_missing_bytes()
        )
        self._channel.send(ended)
        if then is None or not self._can_run_now(then):
            return
        try:
            self.switch_to(then)
        except OutOfPages:
            _logger.info("%s does not fit yet", then)  # the requests fail at the model's turn
        self._report_memory()

    def _step(self, engine: ModelEngine) -> None:
        if engine.steps.are_under_way and self.orders.is_quota_used(self.steps.expected_end_s()):
            self.steps.settle()  # the turn's last step: a further step would delay the next model
            return
        self.residency.ensure_kv(engine.name)
        turn = self.orders.turn
        if not self.steps.begin(engine, turn.chunk_tokens if turn is not None else None):
            self._requests.fail_all(engine.name, f"the engine of {engine.name} lost the request")

    def _receive(self, wait_s: float = 0.0) -> None:
        """Handle all available messages; wait up to ``wait_s`` for a message or a job."""
        WORKER.main.clear()  # an earlier error has been handled
        self._maybe_report()
        for report in self._models.snapshots.finished():
            self._channel.send(report)
        if self._models.is_kept_too_long(time.monotonic()):
            self.steps.settle()
            self._models.close_kept()
        message = self._wait_for_message(wait_s) if wait_s else self._channel.receive(0.0)
        while message is not None and not self._stopping:
            if not may_come_between(message):
                self.steps.settle()
            self._handle(message)
            WORKER.main.clear()
            message = self._channel.receive(0.0)
        for failed in self.steps.take_unsendable():
            self.steps.settle()
            self._requests.abort(failed.model, failed.request_ids)
            self._channel.send(failed)
        for arrived, slot in self.migrations.arrived():
            self.steps.settle()
            self._add_request(arrived, slot)
        self.own.device.set_live(not self.ledger.is_idle())

    def _wait_for_message(self, wait_s: float) -> m.ToWorker | None:
        if self._models.snapshots.is_busy:
            wait_s = _SNAPSHOTS_POLL_S
        fds, prefixes = [*self.migrations.wake_fds, self.turns.wake_fd], self.own.prefixes
        if prefixes is None:
            return self._channel.receive(wait_s, fds)
        message = self._channel.receive(wait_s, [*fds, prefixes.wake_fd])
        prefixes.clear()
        return message

    def _handle(self, message: m.ToWorker) -> None:
        match message:
            case m.AddRequest() if message.kv_transfer is not None:
                self.migrations.expect(message, Arrival(self._channel.take_fd()))
            case m.AddRequest():
                self._add_request(message)
            case m.MigrateOut():
                self._requests.migrate_out(message)
            case m.PeerHost():
                self.migrations.peer_up(message.device, self._channel.take_fd(), message.num_bytes)
            case m.PeerDown():
                self.migrations.peer_down(message.device)
            case m.ReleaseKvTransfer():
                self.migrations.free(message.transfer_id)
            case m.AbortRequests():
                self._requests.abort(message.model, message.request_ids)
            case m.LoadModel():
                fd = self._channel.take_fd() if message.has_snapshot else -1
                self.loads.add(message, fd)
            case m.UnloadModel():
                before = self.driver_memory.outside_pages()
                until_s = time.monotonic() + KEPT_S if message.keeps_engine else 0.0
                kept = self._models.close(message.name, until_s)
                if self.ledger.is_idle():  # else at the next idle moment: streams would stop
                    HEAP.collect()
                freed = self.driver_memory.freed_since(before)
                ended = m.ModelUnloaded(message.name, freed, kept)
                self.loads.cancel(message.name, lambda: self._channel.send(ended))
            case m.DropSnapshot():
                if message.model == self._prefetching_for:
                    self.residency.stop_prefetch()
                self._models.drop_snapshot(message.model)
                self._report_memory()
            case m.TakeSnapshot():
                self._models.take_snapshot(message.model, self._channel.take_fd())
            case m.SetTargets():
                if message.name in self.engines:
                    targets = Targets(message.ttft_s, message.tbt_s)
                    self.ledger.set_targets(message.name, targets)
            case m.RunTurn():
                self.orders.take(message)
            case m.EndTurn():
                self.orders.drop()
            case m.EndIsolation():
                if message.model in self.engines:
                    self.engines[message.model].end_isolation(message.request_id)
            case m.ForgetPrefixes():
                self._forget_prefixes(message.model)
                self.residency.forget_unbound(message.model)
            case m.PrefixPeer():
                fd = self._channel.take_fd()
                if self.own.prefixes is not None:
                    self.own.prefixes.peer_up(message.device, fd)
                os.close(fd)
            case m.Reconfigure():
                set_log_level(message.log_level)
                self._self_checks.interval = message.self_check_interval
            case m.Call():
                if (result := self._answer_call(self, message)) is not None:
                    self._channel.send(result)
            case m.Shutdown():
                self._stopping = True

    def _add_request(self, message: m.AddRequest, slot: Slot | None = None) -> None:
        if self._requests.add(message, slot) and message.is_moving:
            self._report_memory()
            self._channel.send(m.RequestAttached(message.model, message.request_id))

    def _forget_prefixes(self, model: str) -> None:
        if self.own.prefixes is not None:
            self.own.prefixes.forget(model)

    def _begin_load(self, order: LoadOrder) -> str:
        self._status_at_s = 0.0  # the next status shows the load
        return self._models.begin_load(order, time.monotonic())

    def _end_load(self, order: LoadOrder, end: LoadEnd) -> None:
        self._models.end_load(order, end)
        self.interrupt_turn()
        self._report_memory()

    def _can_run(self, model: str) -> bool:
        return model in self.engines and self.engines[model].weights.has_snapshot

    def _can_run_now(self, model: str) -> bool:
        return self._can_run(model) and self._has_room(model)

    def _use(self, name: str) -> Use:
        return Use(
            num_live=self.ledger.num_live(name),
            last_used_s=self._models.last_used_s[name],
            ttft_s=self.ledger.ttft_s(name),
            next_deadline_s=self.ledger.next_deadline_s(name),
        )

    def _num_tokens(self, name: str, request_id: str) -> int | None:
        return self.engines[name].num_output_tokens(request_id)

    def _report_memory(self) -> None:
        if changed := self._changed_missing_bytes():
            self._channel.send(m.MemoryReport(changed))

    def _changed_missing_bytes(self) -> dict[str, int]:
        """Return the bytes that models lack on the device to run, where changed since last time."""
        now = {name: self.residency.missing_bytes(name) for name in self.engines}
        reported, self._missing_bytes = self._missing_bytes, now
        return {name: missing for name, missing in now.items() if reported.get(name) != missing}

    def _maybe_report(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._status_at_s:
            self._status_at_s = now_s + _STATUS_INTERVAL_S
            if self.own.prefixes is not None:
                self.own.prefixes.poll()
            turn, host = self.orders.turn, self.own.host
            unpinned = self.own.device.unpinned()
            report = m.WorkerStatus(
                at_s=now_s,
                activity=DeviceActivity(
                    turn.model if turn else None,
                    self.steps.num_begun,
                    self.own.pool.num_free * self.own.device.page_bytes,
                    kv_host_bytes=host.used_bytes - host.prefix_bytes,
                    prefix_bytes=host.prefix_bytes,
                    num_recomputed=self.residency.eviction.num_recomputed,
                    prefetched_bytes=self.residency.prefetched_bytes,
                ),
                quota_s=turn.quota_s if turn else 0.0,
                kv_host_slab_bytes=host.slabs.reserved_bytes,
                models=[self._memory_of(engine) for engine in self.engines.values()],
                turn_began_s=self.orders.began_s,
                loading=self.loads.progress(is_waited_for=self._waits_for_load),
                unpinned_bytes=unpinned.num_bytes,
                pinning_problem=unpinned.problem,
                unbound_bytes=self.residency.unbound_bytes(),
            )
            self._channel.send(report)

    def _memory_of(self, engine: ModelEngine) -> m.ModelMemory:
        weights, prefixes = engine.weights, engine.prefixes
        return m.ModelMemory(
            model=engine.name,
            weights_resident_bytes=weights.mapped_bytes,
            weights_total_bytes=weights.num_bytes,
            kv_resident_bytes=engine.kv.resident_bytes,
            kv_host_bytes=engine.kv.host_bytes,
            prefix_hit_bytes=0 if prefixes is None else prefixes.hit_bytes,
            prefix_saved_bytes=0 if prefixes is None else prefixes.saved_bytes,
            prefix_peer_bytes=0 if prefixes is None else prefixes.fetched_bytes["peer"],
            prefix_file_bytes=0 if prefixes is None else prefixes.fetched_bytes["file"],
            encoder_bytes=engine.encoder_bytes,
            num_live=self.ledger.num_live(engine.name),
            num_waiting=self.ledger.num_waiting(engine.name),
        )
