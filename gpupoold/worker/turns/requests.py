"""A worker's requests: records and orders, migration with KV, and the steps of a turn."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpupoold.domain import FinalFailure, Targets
from gpupoold.errors import GpupoolError, Refused
from gpupoold.memory.device import Device
from gpupoold.memory.host import HostSlot, KvHostCache, Slot
from gpupoold.memory.transfers import Arrival, DeviceThread, PeerCache, PeerSlot, Transfer
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire import messages as m
from gpupoold.wire.channel import FrameTooLong
from gpupoold.wire.messages import RunTurn
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.engine.steps import Step
from gpupoold.worker.kv.residency import Residency

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine


ALONE_S, GRAMMAR_S = 1.0, 5.0
"""Seconds to wait for other threads to be idle, and for the request's grammar.

Other requests of the worker wait meanwhile.
"""
_POLL_S = 0.001

_logger = logging.getLogger(__name__)

# Outputs of fewer bytes are sent without a record on the activity page: no lack of memory ends the
# worker just then.
_RECORDED_BYTES = 1 << 20


@dataclass(slots=True)
class _Page:
    targets: Targets
    arrivals_s: dict[str, float] = field(default_factory=dict)
    """Time of arrival by request id."""


class RequestLedger:
    """Live requests by model. Events about ended requests are ignored.

    ``num_tokens(model, request_id)`` returns the number of tokens that the engine has made for a
    request, None for a request whose end is not reported yet. The engine counts tokens anyway; a
    second count would cost a part of each step.
    """

    def __init__(self, num_tokens: Callable[[str, str], int | None]) -> None:
        self._num_tokens = num_tokens
        self._pages: dict[str, _Page] = {}

    def add_model(self, model: str, targets: Targets) -> None:
        """Add a model, which can then have requests."""
        self._pages[model] = _Page(targets)

    def set_targets(self, model: str, targets: Targets) -> None:
        """Set a model's targets, for live requests too."""
        self._pages[model].targets = targets

    def remove_model(self, model: str) -> None:
        """Remove a model and its requests."""
        del self._pages[model]

    def arrive(self, model: str, request_id: str, arrival_s: float) -> None:
        self._pages[model].arrivals_s[request_id] = arrival_s

    def finish(self, model: str, request_ids: Iterable[str]) -> None:
        """Record the end of requests."""
        arrivals_s = self._pages[model].arrivals_s
        for request_id in request_ids:
            arrivals_s.pop(request_id, None)

    def is_idle(self) -> bool:
        """Return whether no model has a request."""
        return not any(page.arrivals_s for page in self._pages.values())

    def num_live(self, model: str) -> int:
        """Return the number of the model's live requests."""
        return len(self._pages[model].arrivals_s)

    def num_waiting(self, model: str) -> int:
        """Return the number of the model's requests without a token."""
        return sum(num_tokens == 0 for _, num_tokens in self._counted(model))

    def live_requests(self, model: str) -> list[str]:
        """Return the ids of the model's live requests."""
        return list(self._pages[model].arrivals_s)

    def ttft_s(self, model: str) -> float:
        return self._pages[model].targets.ttft_s

    def next_deadline_of_all_s(self) -> float:
        """Return the earliest deadline of all requests; infinity without requests."""
        return min(map(self.next_deadline_s, self._pages), default=math.inf)

    def next_deadline_s(self, model: str) -> float:
        """Return the earliest deadline among the model's requests; infinity without requests."""
        targets = self._pages[model].targets
        deadlines_s = (targets.deadline_s(*counted) for counted in self._counted(model))
        return min(deadlines_s, default=math.inf)

    def _counted(self, model: str) -> Iterator[tuple[float, int]]:
        for request_id, arrival_s in self._pages[model].arrivals_s.items():
            if (num_tokens := self._num_tokens(model, request_id)) is not None:
                yield arrival_s, num_tokens


class Orders:
    """The latest valid order of the daemon. Pure bookkeeping."""

    def __init__(self) -> None:
        self.turn: RunTurn | None = None
        self._began_s = math.inf
        self._last_ended = 0

    def take(self, order: RunTurn) -> None:
        """Take a new order. Ignore orders for a turn that has already ended."""
        if order.turn_id <= self._last_ended:
            return
        if self.turn is None or order.turn_id != self.turn.turn_id:
            self._began_s = math.inf
        self.turn = order

    @property
    def then(self) -> str | None:
        """The model to prepare next, if another model waits."""
        return None if self.turn is None else self.turn.then

    def drop(self) -> None:
        """Drop the present turn without a report."""
        self.turn, self._began_s = None, math.inf

    def began(self, now_s: float) -> None:
        """Record that the turn's model is resident; only the first call of a turn counts."""
        self._began_s = min(self._began_s, now_s)

    @property
    def began_s(self) -> float | None:
        """The time when the turn's model was first resident, None before."""
        return self._began_s if math.isfinite(self._began_s) else None

    def is_quota_used(self, now_s: float) -> bool:
        """Return whether another model waits and the turn has used its quota."""
        if self.turn is None or self.then is None:
            return False
        return now_s >= self._began_s + self.turn.quota_s

    def end(self) -> tuple[int, str | None]:
        """End the turn; return its id, and the model to prepare next."""
        assert self.turn is not None
        ended, then = self.turn.turn_id, self.then
        self._last_ended = max(self._last_ended, ended)
        self.drop()
        return ended, then


@dataclass(slots=True)
class _Sent:
    slot: HostSlot
    transfer: Transfer
    arrival: Arrival

    def close(self) -> None:
        """Free the slot and the eventfd; no copy to the slot may be running."""
        self.slot.free()
        self.arrival.close()


@dataclass(slots=True)
class _Coming:
    """A request that waits for its KV; ``slot`` is None if the KV will not arrive."""

    message: m.AddRequest
    slot: PeerSlot | None
    arrival: Arrival


@dataclass(eq=False)
class KvMigrations:
    """KV transfers from this worker to other workers, and from other workers to this worker."""

    device_number: int
    device: Device
    host: KvHostCache
    send: Callable[[m.Message, tuple[int, ...]], None]
    _peers: dict[int, PeerCache] = field(default_factory=dict, init=False)
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False)
    _doomed: list[_Sent] = field(default_factory=list, init=False)
    """Not needed, but a copy is running."""
    _coming: dict[str, _Coming] = field(default_factory=dict, init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        self._thread = DeviceThread(self.device, "peers")

    @property
    def wake_fds(self) -> list[int]:
        """Descriptors that become readable when ``arrived`` has new requests."""
        return [coming.arrival.fd for coming in self._coming.values()]

    @property
    def sent_bytes(self) -> int:
        """Bytes of host memory in KV transfers that other workers may read."""
        return sum(sent.slot.num_bytes for sent in (*self._sent.values(), *self._doomed))

    def migrate_out(self, engine: ModelEngine, residency: Residency, request_id: str) -> None:
        """End a request here, start to copy its KV for another device, and send ``Migrated``."""
        computed = engine.computed_kv(request_id)
        if computed is None:
            self.send(m.Migrated(engine.name, request_id, is_known=False), ())
            return
        arrival = Arrival()
        copied = None
        if computed.blocks:
            copied = residency.export(engine.name, computed.blocks, arrival.signal)
        engine.abort([request_id])
        if copied is None:
            arrival.close()
            self.send(m.Migrated(engine.name, request_id), ())
            return
        slot, transfer = copied
        transfer_id = f"{os.getpid()}-{next(self._numbers)}"
        self._sent[transfer_id] = _Sent(slot, transfer, arrival)
        offsets = [(at.offset, at.num_bytes) for at in slot.blocks.extents]
        kv_transfer = m.KvTransfer(
            transfer_id, self.device_number, len(computed.blocks), offsets, computed.num_tokens
        )
        self.send(m.Migrated(engine.name, request_id, kv_transfer=kv_transfer), (arrival.fd,))

    def free(self, transfer_id: str) -> None:
        """Free a KV transfer that no worker reads any more; ignore an unknown id."""
        sent = self._sent.pop(transfer_id, None)
        if sent is not None:
            self._doomed.append(sent)
            self._settle()

    def _settle(self) -> None:
        for sent in [sent for sent in self._doomed if sent.transfer.has_ended]:
            self._doomed.remove(sent)
            sent.close()

    def peer_up(self, device_number: int, fd: int, num_bytes: int) -> None:
        """Map another worker's host cache, replacing the mapping of its previous process."""
        self.peer_down(device_number)
        try:
            self._peers[device_number] = PeerCache(fd, num_bytes, self.device, self._thread)
        except OSError as error:  # the peer's requests recompute KV
            _logger.error("the host cache of worker %d cannot be mapped: %s", device_number, error)

    def peer_down(self, device_number: int) -> None:
        """Handle the death of a worker: KV that has not arrived is lost."""
        for coming in self._coming.values():
            kv_transfer = coming.message.kv_transfer
            if (
                kv_transfer is not None
                and kv_transfer.source == device_number
                and not coming.arrival.is_signalled()
            ):
                coming.arrival.signal(False)
        cache = self._peers.pop(device_number, None)
        if cache is not None:
            cache.leave()

    def expect(self, message: m.AddRequest, arrival: Arrival) -> None:
        """Register a request with a KV transfer in progress; ``arrived`` returns the request later.

        If the sender's host cache is not usable (yet), the request continues at once without KV.
        """
        kv_transfer = message.kv_transfer
        assert kv_transfer is not None
        peer = self._peers.get(kv_transfer.source)
        if peer is None or not peer.is_usable:
            arrival.signal(False)
            self._used(kv_transfer)
            self._coming[message.request_id] = _Coming(message, None, arrival)
            return
        slot = peer.slot(kv_transfer.offsets, lambda: self._used(kv_transfer))
        self._coming[message.request_id] = _Coming(message, slot, arrival)

    def arrived(self) -> list[tuple[m.AddRequest, PeerSlot | None]]:
        """Return requests that can continue, oldest first, each with its KV if all has arrived."""
        if self._doomed:
            self._settle()
        if not self._coming:
            return []
        signalled = [coming for coming in self._coming.values() if coming.arrival.is_signalled()]
        for coming in signalled:
            del self._coming[coming.message.request_id]
            if coming.slot is not None and not coming.arrival.has_arrived():
                coming.slot.free()
                coming.slot = None
            coming.arrival.close()
        return [(coming.message, coming.slot) for coming in signalled]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop the KV of ended requests; ignore unknown requests."""
        for request_id in request_ids:
            coming = self._coming.pop(request_id, None)
            if coming is not None:
                coming.arrival.close()
                if coming.slot is not None:
                    coming.slot.free()

    def close(self) -> None:
        """Unmap the peers' host caches and end the thread."""
        for worker in list(self._peers):
            self.peer_down(worker)
        self._thread.close()

    def _used(self, kv_transfer: m.KvTransfer) -> None:
        self.send(m.KvTransferUsed(kv_transfer.transfer_id, kv_transfer.source), ())


@dataclass(eq=False, slots=True)
class TurnRequests:
    """Adds requests to ``engines`` and ends requests, between two steps.

    ``send`` sends a message to the daemon; ``is_loading`` returns whether a model is being loaded.
    """

    device_number: int
    engines: Mapping[str, ModelEngine]
    ledger: RequestLedger
    migrations: KvMigrations
    residency: Residency
    send: Callable[[m.FromWorker], None]
    is_loading: Callable[[], bool]

    def add(self, message: m.AddRequest, slot: Slot | None = None) -> bool:
        """Add a request, or report the reason why not; ``slot`` has its KV, if any."""
        engine = self.engines.get(message.model)
        kv = (slot, message.kv_transfer) if slot is not None and message.kv_transfer else None
        try:
            if engine is None or not engine.weights.has_snapshot:
                if slot is not None:
                    slot.free()
                lacks = "is not loaded" if engine is None else "has no snapshot"
                raise Refused(f"{message.model} {lacks} on worker {self.device_number}")
            with WORKER.main.doing(ThreadPhase.ADD_REQUEST, message.model, [message.request_id]):
                self._add_to(engine, message, kv)
        except GpupoolError as error:
            failed = m.RequestsFailed(message.model, [message.request_id], str(error))
            self.send(failed)
            return False
        self.ledger.arrive(message.model, message.request_id, message.arrival_s)
        return True

    def _add_to(
        self, engine: ModelEngine, message: m.AddRequest, kv: tuple[Slot, m.KvTransfer] | None
    ) -> None:
        """Add a request to its engine; wait for idle threads before an isolated request."""
        if not message.is_isolated:
            engine.add(message.frames, message.output_token_ids, kv, message.frontend)
            return
        wait_until(lambda: WORKER.is_alone or self.is_loading(), ALONE_S)
        engine.isolate(message.request_id)
        engine.add(message.frames, message.output_token_ids, kv, message.frontend)
        wait_until(lambda: engine.has_grammar(message.request_id), GRAMMAR_S)

    def migrate_out(self, message: m.MigrateOut) -> None:
        """Send a request to another worker, with its KV if possible."""
        engine = self.engines.get(message.model)
        if engine is None:
            self.send(m.Migrated(message.model, message.request_id, is_known=False))
            return
        self.migrations.migrate_out(engine, self.residency, message.request_id)
        self.residency.save_prefixes(message.model)
        self.ledger.finish(message.model, [message.request_id])
        engine.kv.discard_dead()

    def abort(self, model: str, request_ids: list[str]) -> None:
        """End requests, with their KV transfers."""
        self.migrations.abort(request_ids)
        engine = self.engines.get(model)
        if engine is None:
            return
        engine.abort(request_ids)
        self.residency.save_prefixes(model)
        self.ledger.finish(model, request_ids)
        engine.kv.discard_dead()

    def fail_all(self, model: str, reason: str) -> None:
        """End all requests of a model and report the reason."""
        request_ids = self.ledger.live_requests(model)
        self.abort(model, request_ids)
        if request_ids:
            self.send(m.RequestsFailed(model, request_ids, reason))


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Return True when the condition holds, False after ``limit_s``.

    See :mod:`gpupoold.control.requests.core_shell`. The scheduler isolates the requests' steps.
    """
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def may_come_between(message: m.ToWorker) -> bool:
    """Return whether a message leaves residency and running requests unchanged.

    Such a message may be handled while a step is under way.
    """
    if isinstance(message, m.AddRequest):
        return not message.output_token_ids and not message.is_isolated
    harmless = m.RunTurn | m.EndTurn | m.SetTargets | m.ReleaseKvTransfer | m.Reconfigure
    return isinstance(message, harmless)


@dataclass(eq=False, slots=True)
class TurnSteps:
    """The steps of the present model; ``send`` sends a message to the daemon."""

    ledger: RequestLedger
    send: Callable[[m.StepOutputs], None]
    clock: Callable[[], float] = time.monotonic
    num_begun: int = field(default=0, init=False)
    _engine: ModelEngine | None = field(default=None, init=False)
    """May have a launched step."""
    _since_s: float = field(default=0.0, init=False)
    """Start of the device's present step."""
    _last_s: float = field(default=0.0, init=False)
    """Duration of the step before."""
    _unsendable: list[m.RequestsFailed] = field(default_factory=list, init=False)

    def begin(self, engine: ModelEngine, chunk_tokens: int | None) -> bool:
        """Start a step and report the previous one; return whether the engine still has
        requests.
        """
        steps = engine.steps
        if not steps.are_under_way:
            if ended_elsewhere := steps.take():
                self._report(engine, ended_elsewhere)
            self._since_s = self.clock()
        self._engine = engine
        self.num_begun += 1
        made = steps.begin(chunk_tokens)
        self._report(engine, made)
        has_told = bool(self._unsendable) or any(step.frames for step in made)
        return has_told or steps.are_under_way or engine.has_requests()

    def expected_end_s(self) -> float:
        """Return the expected end of the present step.

        The present step is expected to take as long as the previous step.
        """
        return self._since_s + self._last_s

    def settle(self) -> None:
        """Wait for launched steps and report all results."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._report(engine, engine.steps.settle())

    def take_unsendable(self) -> list[m.RequestsFailed]:
        """Return requests to be ended and reported: their outputs were too long for a message, or
        their grammars took more CPU time than they may.
        """
        taken, self._unsendable = self._unsendable, []
        return taken

    def _report(self, engine: ModelEngine, steps: Sequence[Step]) -> None:
        for request_id, refusal in engine.steps.take_refused().items():
            failed = m.RequestsFailed(
                engine.name,
                [request_id],
                refusal.reason,
                code=FinalFailure.GRAMMAR if refusal.is_final else "",
                grammar=refusal.digest,
            )
            self._unsendable.append(failed)
        # The duration of a step that has waited for weights says nothing about other steps.
        has_waited = bool(steps) and engine.take_waited_s() > 0
        for step in steps:
            ended_s = self.clock()
            # Steps follow each other on the device: a step begins when the previous step ends.
            step_s = ended_s - self._since_s
            self._since_s = ended_s
            if not has_waited:
                self._last_s = step_s
            self.ledger.finish(engine.name, step.ended)
            if step.frames:
                outputs = m.StepOutputs(
                    engine.name,
                    ended_s,
                    step.frames,
                    step.progress,
                    step_s / _tokens_each(step) if step.is_decode and not has_waited else None,
                    step.frame_counts,
                    step.drafts,
                )
                if sum(map(len, step.frames)) < _RECORDED_BYTES:
                    self.send(outputs)
                else:
                    self._send_long(outputs)

    def _send_long(self, outputs: m.StepOutputs) -> None:
        ids = [item.request_id for item in outputs.progress]
        WORKER.begin_report(outputs.model, ids)
        try:
            self.send(outputs)
        except FrameTooLong as error:
            self._unsendable.append(m.RequestsFailed(outputs.model, ids, str(error)))
        WORKER.end_report()


def _tokens_each(step: Step) -> float:
    """Return the mean number of tokens that an answer gained: more than 1 with accepted drafts."""
    if step.drafts is None:
        return 1.0
    counts = [len(item.new_token_ids) for item in step.progress if item.new_token_ids]
    return sum(counts) / len(counts) if counts else 1.0
