"""Migrations of requests from one worker to another.

The *source* gets the order to release a request. The source answers when the copy of the KV to its
host memory has begun, and the *target* gets the request with the place of the KV. From then on the
source is not needed: if the source dies, the target recomputes missing KV. If the target dies, the
request restarts from its tokens like any request of a dead worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.workers.worker import Worker
from gpupoold.wire import messages as m


@dataclass(slots=True)
class _Migration:
    """A migration; ``target`` None means that the target died before the request left."""

    source: int
    target: int | None
    has_left: bool = False


class Migrations:
    """Carries out migrations; one per daemon."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        live: LiveRequests,
        order_of: Callable[[LiveRequest], m.AddRequest],
        start_anew: Callable[[LiveRequest], None],
    ) -> None:
        """``order_of`` returns the message that continues a request on a worker.

        ``start_anew`` schedules a request without a worker.
        """
        self._workers = workers
        self._live = live
        self._order_of = order_of
        self._start_anew = start_anew
        self._migrations: dict[str, _Migration] = {}
        self._kv_transfers: dict[str, tuple[int, int]] = {}  # source and target of each
        self._introduced: set[tuple[int, int]] = set()  # source and target of each
        self.num_migrated = 0
        self.num_unknown = 0  # not with their source when it was told to let them go

    def introduce(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Let these targets read the host caches of these sources, whose requests will come.

        Done once for each pair, and only where requests do move: a GPU pins the whole cache,
        0.1 s per GB, and takes requests without KV until then.
        """
        numbers = list(targets)
        for source in sources:
            for target in numbers:
                if source != target and (source, target) not in self._introduced:
                    self._introduce(source, target)

    def begin(self, request: LiveRequest, source: int, target: int) -> None:
        """Start migrating a request; :meth:`left` sends the request to the target."""
        self.introduce([source], [target])
        self._migrations[request.request_id] = _Migration(source, target)
        self._workers[source].send(m.MigrateOut(request.model, request.request_id))

    def left(self, worker: Worker, message: m.Migrated) -> None:
        """Handle a request's departure from its source, after all its tokens so far."""
        self.num_unknown += not message.is_known
        fds = (worker.take_fd(),) if message.kv_transfer is not None else ()
        try:
            self._pass_on(worker, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def attached(self, request_id: str) -> LiveRequest | None:
        """Return a request that can continue at its target, None if the request has ended."""
        move = self._migrations.pop(request_id, None)
        self.num_migrated += move is not None
        return None if move is None else self._live.get(request_id)

    def kv_transfer_used(self, transfer_id: str) -> None:
        """A target does not need a KV transfer any more."""
        kv_transfer = self._kv_transfers.pop(transfer_id, None)
        if kv_transfer is not None:
            self._send(kv_transfer[0], m.ReleaseKvTransfer(transfer_id))

    def ended(self, request_id: str) -> None:
        """Record the end of a request."""
        self._migrations.pop(request_id, None)

    def lost(self, number: int) -> list[LiveRequest]:
        """Return the requests on the way to a dead worker.

        Includes requests that their source has not released yet; until then no policy may schedule
        them.
        """
        for transfer_id, (source, target) in list(self._kv_transfers.items()):
            if number in (source, target):
                del self._kv_transfers[transfer_id]
            if number == target:
                self._send(source, m.ReleaseKvTransfer(transfer_id))
        for source, target in list(self._introduced):
            if number in (source, target):
                self._introduced.discard((source, target))
            if number == source:
                self._send(target, m.PeerDown(number))
        waiting = []
        for request_id, move in list(self._migrations.items()):
            if move.target == number and not move.has_left:
                move.target = None
                waiting.append(self._live.get(request_id))
            elif number == (move.target if move.has_left else move.source):
                del self._migrations[request_id]
        return [request for request in waiting if request is not None]

    def _pass_on(self, worker: Worker, message: m.Migrated, fds: tuple[int, ...]) -> None:
        move = self._migrations.get(message.request_id)
        request = self._live.get(message.request_id)
        if move is None or request is None or move.has_left:
            self._let_go(worker, message.kv_transfer)
            return
        if move.target is None:
            self._let_go(worker, message.kv_transfer)
            del self._migrations[message.request_id]
            self._start_anew(request)
            return
        move.has_left = True
        request.device = move.target
        if message.kv_transfer is not None:
            self._kv_transfers[message.kv_transfer.transfer_id] = move.source, move.target
        order = msgspec.structs.replace(
            self._order_of(request), is_moving=True, kv_transfer=message.kv_transfer
        )
        self._workers[move.target].send(order, fds)

    def _let_go(self, source: Worker, kv_transfer: m.KvTransfer | None) -> None:
        """Release a KV transfer that no worker will read."""
        if kv_transfer is not None:
            source.send(m.ReleaseKvTransfer(kv_transfer.transfer_id))

    def _introduce(self, source: int, target: int) -> None:
        worker, to = self._workers.get(source), self._workers.get(target)
        if worker is None or to is None or not (worker.is_ready and to.is_ready):
            return
        ready = worker.ready
        if worker.kv_host_fd is not None and ready is not None and ready.kv_host_bytes:
            to.send(m.PeerHost(source, ready.kv_host_bytes), (worker.kv_host_fd,))
            self._introduced.add((source, target))

    def _send(self, number: int, message: m.Message) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.send(message)
