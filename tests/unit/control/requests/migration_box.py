"""A dispatcher and workers that answer as real ones do, when the test lets them.

Messages wait on both ways until they are heard. What must hold at any time is checked against
what the workers have.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from gpupool_state import History
from gpupoold.config.sections import DeviceSettings, LimitSettings
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceFacts, FinishReason, Role, Targets
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import make_policy
from gpupoold.scheduling.state import RequestPhase
from gpupoold.wire import messages as m
from tests.unit.control.fleet_box import FleetBox, settings_with
from tests.unit.control.loaded import loaded

MODELS = ("llama", "mixtral")


class Records:
    """A history that keeps how requests ended."""

    def __init__(self) -> None:
        self.ends: dict[str, FinishReason] = {}

    def record_request(self, row: object) -> None:
        ended = cast(SimpleNamespace, row)
        assert ended.request_id not in self.ends, f"{ended.request_id} ended twice"
        self.ends[ended.request_id] = ended.finish_reason

    def record_event(self, *_: object) -> None:
        """Not looked at here."""


@dataclass(eq=False)
class Answer:
    """A request on a worker. Its n-th token is n."""

    order: m.AddRequest
    num_tokens: int
    borrowed: m.KvTransfer | None = None


class FakeWorker(Worker):
    """Heeds messages and says what it would, in order, one at a time.

    ``coming`` are requests whose KV is on its way, ``KV transfers`` those that others may read.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, DeviceSettings(kind="emulated"), state="down")
        self._num_kv_transfers = 0
        self.forget()

    def forget(self) -> None:
        """As after a death."""
        self.inbox: deque[m.Message] = deque()
        self.outbox: deque[m.FromWorker] = deque()
        self.answers: dict[str, Answer] = {}
        self.coming: dict[str, m.AddRequest] = {}
        self.kv_transfers: set[str] = set()
        self.peers: set[int] = set()
        self.turn: m.RunTurn | None = None

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        if self.is_ready:
            assert len(fds) == _num_fds(message)
            self.inbox.append(message)

    def take_fd(self) -> int:
        return os.eventfd(0)

    def heed(self, *, has_kv: bool = True) -> m.Message:
        """The next message is taken note of; ``has_kv``: who has to go can take its KV along."""
        message = self.inbox.popleft()
        match message:
            case m.AddRequest() if message.kv_transfer is not None:
                assert message.kv_transfer.source in self.peers
                self.coming[message.request_id] = message
            case m.AddRequest():
                self._go_on(message, None)
            case m.MigrateOut():
                self._migrate_out(message, has_kv)
            case m.AbortRequests():
                for request_id in message.request_ids:
                    self._drop(request_id)
            case m.ReleaseKvTransfer():
                self.kv_transfers.remove(message.transfer_id)
            case m.PeerHost():
                self.peers.add(message.device)
            case m.PeerDown():
                self.peers.discard(message.device)
                for one in list(self.coming.values()):
                    if one.kv_transfer is not None and one.kv_transfer.source == message.device:
                        self.arrive(one.request_id, is_there=False)
            case m.EndTurn():
                self.end_turn()
            case m.RunTurn():
                self._take_turn(message)
        return message

    def arrive(self, request_id: str, *, is_there: bool = True) -> None:
        """KV has come, or never will."""
        order = self.coming.pop(request_id)
        if order.kv_transfer is not None and not is_there:
            self._used(order.kv_transfer)
        self._go_on(order, order.kv_transfer if is_there else None)

    def refuse(self, request_id: str) -> None:
        """KV has come, but the engine does not take the request."""
        order = self.coming.pop(request_id)
        if order.kv_transfer is not None:
            self._used(order.kv_transfer)
        self.outbox.append(m.RequestsFailed(order.model, [request_id], "refused"))

    def use(self, request_id: str) -> None:
        """KV of a request has come to the device."""
        answer = self.answers[request_id]
        if answer.borrowed is not None:
            self._used(answer.borrowed)
            answer.borrowed = None

    def step(self, model: str) -> None:
        """Every request of a model has one more token; some end with it."""
        progress = []
        for request_id, answer in list(self.answers.items()):
            if answer.order.model != model:
                continue
            answer.num_tokens += 1
            is_done = answer.num_tokens == answer.order.max_tokens
            tokens = [answer.num_tokens - 1]
            progress.append(m.RequestProgress(request_id, tokens, "length" if is_done else None))
            if is_done:
                self._drop(request_id)
        if progress:
            self.outbox.append(m.StepOutputs(model, 0.0, [], progress, 0.01))

    def end_turn(self) -> None:
        """The turn under way is over."""
        if self.turn is not None:
            self.outbox.append(m.TurnReport(self.turn.turn_id, self.turn.model, None, 0.0, {}))
            self.turn = None

    def kv_transfers_in_use(self) -> Iterator[str]:
        """KV transfers that it reads, or will."""
        orders = [one for one in self.inbox if isinstance(one, m.AddRequest)]
        for order in (*orders, *self.coming.values()):
            if order.kv_transfer is not None:
                yield order.kv_transfer.transfer_id
        for answer in self.answers.values():
            if answer.borrowed is not None:
                yield answer.borrowed.transfer_id

    def num_places(self, request_id: str) -> int:
        """How often it has a request, or is to get it."""
        orders = [one for one in self.inbox if isinstance(one, m.AddRequest)]
        waiting = sum(one.request_id == request_id for one in orders)
        return waiting + (request_id in self.answers) + (request_id in self.coming)

    def tells_of(self, request_id: str) -> bool:
        """Return whether the daemon will hear that it has no longer got a request."""
        return any(_is_end_of(message, request_id) for message in self.outbox)

    def _take_turn(self, order: m.RunTurn) -> None:
        if self.turn is not None and order.turn_id > self.turn.turn_id:
            self.end_turn()
        self.turn = order

    def _go_on(self, order: m.AddRequest, borrowed: m.KvTransfer | None) -> None:
        assert order.request_id not in self.answers
        assert order.output_token_ids == list(range(len(order.output_token_ids)))
        answer = Answer(order, len(order.output_token_ids), borrowed)
        self.answers[order.request_id] = answer
        if order.is_moving:
            self.outbox.append(m.RequestAttached(order.model, order.request_id))

    def _migrate_out(self, message: m.MigrateOut, has_kv: bool) -> None:
        if message.request_id not in self.answers:
            self.outbox.append(m.Migrated(message.model, message.request_id, is_known=False))
            return
        self._drop(message.request_id)
        kv_transfer = None
        if has_kv:
            self._num_kv_transfers += 1
            kv_transfer = m.KvTransfer(
                f"{self.number}-{self._num_kv_transfers}", self.number, 1, [(0, 1)], 16
            )
            self.kv_transfers.add(kv_transfer.transfer_id)
        self.outbox.append(m.Migrated(message.model, message.request_id, kv_transfer=kv_transfer))

    def _drop(self, request_id: str) -> None:
        answer, order = self.answers.pop(request_id, None), self.coming.pop(request_id, None)
        if answer is not None and answer.borrowed is not None:
            self._used(answer.borrowed)
        if order is not None and order.kv_transfer is not None:
            self._used(order.kv_transfer)

    def _used(self, kv_transfer: m.KvTransfer) -> None:
        self.outbox.append(m.KvTransferUsed(kv_transfer.transfer_id, kv_transfer.source))


class Box:
    """A daemon's requests on some workers, all of which have all models."""

    def __init__(self, num_workers: int) -> None:
        self.now_s = 0.0
        self.records = Records()
        self.sent: list[m.Message] = []
        self.box = FleetBox(MODELS)
        for name in MODELS:
            self.box.warm.add(name)
        self.dispatcher = Dispatcher(
            settings_with(LimitSettings()),
            cast(History, self.records),
            make_policy("gpupool"),
            self.box.fleet,
            lambda _, message: self.sent.append(message),
            clock=lambda: self.now_s,
        )
        self.migrations = self.dispatcher.migrations
        self.workers = [FakeWorker(number) for number in range(num_workers)]
        self._num_asked = 0
        for number in range(num_workers):
            self.come_up(number)

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [one.request_id for one in self.dispatcher.live.all()]

    def come_up(self, number: int) -> None:
        """A worker starts, and has all models."""
        worker = self.workers[number]
        worker.forget()
        worker.state, worker.kv_host_fd = "ready", 0
        worker.ready = m.WorkerReady(
            DeviceFacts(1 << 30, 4096, 1e9, kv_host_limit_bytes=1 << 40), "0.32.0"
        )
        self.dispatcher.worker_up(worker)
        for name in MODELS:
            self.dispatcher.host(Targets(), loaded(name), None, worker)
        self.box.come_up(number)

    def die(self, number: int, num_heard: int = 1_000) -> None:
        """A worker ends. So many of the messages that it had sent are still heard."""
        worker = self.workers[number]
        for _ in range(min(num_heard, len(worker.outbox))):
            self.hear(number)
        worker.state = "down"  # the daemon keeps the memory for the next process
        worker.forget()
        self.dispatcher.worker_down(worker, "died")

    def ask(self, max_tokens: int, model: str = MODELS[0]) -> str:
        """A request comes; its id."""
        self._num_asked += 1
        request_id = f"r{self._num_asked}"
        order = m.AddRequest(model, request_id, self.now_s, 2, max_tokens, [b""])
        self.dispatcher.from_frontend(order)
        return request_id

    def cancel(self, request_id: str) -> None:
        """The client leaves."""
        model = next(
            one.model for one in self.dispatcher.live.all() if one.request_id == request_id
        )
        self.dispatcher.from_frontend(m.AbortRequests(model, [request_id]))

    def hear(self, number: int) -> m.Message:
        """The daemon hears the next message of a worker."""
        message = self.workers[number].outbox.popleft()
        self.dispatcher.from_worker(self.workers[number], message)
        return message

    def heed(self, number: int, *, has_kv: bool = True) -> m.Message:
        """A worker takes note of its next message; of no KV transfer in use that it is free."""
        message = self.workers[number].heed(has_kv=has_kv)
        if isinstance(message, m.ReleaseKvTransfer):
            for worker in self.workers:
                assert message.transfer_id not in worker.kv_transfers_in_use()
        return message

    def exchange(self) -> bool:
        """All that has been said is heard, on both sides; whether anything was."""
        was_any = False
        while any(one.inbox or one.outbox for one in self.workers):
            was_any = True
            for worker in self.workers:
                while worker.inbox:
                    self.heed(worker.number)
                while worker.outbox:
                    self.hear(worker.number)
        return was_any

    def settle(self) -> None:
        """All workers are there and do what they are to; in the end nobody has anything."""
        for worker in self.workers:
            if not worker.is_ready:
                self.come_up(worker.number)
            self.dispatcher.set_role(worker.number, Role.MIXED)
            self.dispatcher.set_draining(worker.number, is_draining=False)
        for _ in range(1_000):
            self.exchange()
            if not self.live:
                break
            for worker in self.workers:
                for request_id in list(worker.coming):
                    worker.arrive(request_id)
                for request_id in list(worker.answers):
                    worker.use(request_id)
                for name in MODELS:
                    worker.step(name)
                worker.end_turn()
            self.tick()
        self.exchange()
        self.check()
        self.check_empty()

    def tick(self) -> None:
        """Time passes."""
        self.now_s += 1.5
        self.dispatcher.tick(self.now_s)

    def check(self) -> None:
        """No request is lost or in two places, no token is lost or told twice."""
        check_state(self.dispatcher.state)
        unsent = {
            one.id
            for one in self.dispatcher.state.requests.values()
            if one.phase in (RequestPhase.HELD, RequestPhase.QUEUED)
        }
        for request in self.dispatcher.live.all():
            name = request.request_id
            assert (request.device is None) == (name in unsent)
            assert request.output_token_ids == list(range(len(request.output_token_ids)))
            num_places = sum(one.num_places(name) for one in self.workers) + (name in unsent)
            assert num_places <= 1, f"{name} is in {num_places} places"
            is_told_of = any(one.tells_of(name) for one in self.workers)
            assert num_places or is_told_of, f"{name} is lost"
        there = {kv_transfer for one in self.workers for kv_transfer in one.kv_transfers}
        assert self.dispatcher.kv_peers.transfers.keys() <= there

    def check_empty(self) -> None:
        """Nobody has a request, or anything that was for one."""
        assert self.live == []
        assert self.dispatcher.kv_peers.transfers == {}
        assert self.dispatcher.state.requests == {}
        for worker in self.workers:
            assert (worker.answers, worker.coming, worker.kv_transfers) == ({}, {}, set())


def _num_fds(message: m.Message) -> int:
    has_kv_transfer = isinstance(message, m.AddRequest) and message.kv_transfer is not None
    return int(has_kv_transfer or isinstance(message, m.PeerHost | m.PrefixPeer))


def _is_end_of(message: m.Message, request_id: str) -> bool:
    match message:
        case m.Migrated():
            return message.request_id == request_id
        case m.RequestsFailed():
            return request_id in message.request_ids
        case m.StepOutputs():
            ended = [one.request_id for one in message.progress if one.finish_reason]
            return request_id in ended
    return False
