"""Migrations of requests from one worker to another.

The *source* gets the order to release a request. The source answers when the copy of the KV to its
host memory has begun, and the *target* gets the request with the place of the KV. Then the source
is no longer needed: if the source dies, the target recomputes missing KV. If the target dies, the
request restarts from the tokens so far like any request of a dead worker.

:class:`gpupoold.control.live_requests.Migration` has the phases.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import msgspec

from gpupoold.control.live_requests import LiveRequest, LiveRequests, Migration, MigrationEvent
from gpupoold.control.workers.worker import Worker
from gpupoold.wire import messages as m


class Migrations:
    """Carries out migrations; the records of the requests have the phases."""

    def __init__(
        self, workers: Mapping[int, Worker], live: LiveRequests, kv_peers: KvPeers
    ) -> None:
        self._workers = workers
        self._live = live
        self._kv_peers = kv_peers
        self.num_migrated = 0
        self.num_unknown = 0  # orders to release a request unknown to the source

    def begin(self, request: LiveRequest, source: int, target: int) -> None:
        """Start migrating a request; :meth:`released` sends the request to the target."""
        self._kv_peers.introduce([source], [target])
        request.migration = Migration(source, target)
        self._workers[source].send(m.MigrateOut(request.model, request.request_id))

    def released(self, worker: Worker, message: m.Migrated) -> LiveRequest | None:
        """Handle the departure of a request from the source, after all tokens so far.

        Returns the request for a restart if the target has died.
        """
        self.num_unknown += not message.is_known
        fds = (worker.take_fd(),) if message.kv_transfer is not None else ()
        try:
            return self._pass_on(worker, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def attached(self, request_id: str, now_s: float) -> LiveRequest | None:
        """Return the request to continue on the target, None after the end of the request."""
        request = self._live.get(request_id)
        migration = None if request is None else request.migration
        if request is None or migration is None or not migration.expects(MigrationEvent.ATTACHED):
            return None
        request.migration = migration.after(MigrationEvent.ATTACHED)
        request.attached_s = now_s
        self.num_migrated += 1
        return request

    def worker_down(self, number: int) -> list[LiveRequest]:
        """Return the requests on the way to a dead worker and not yet released by the source.

        Until the release no policy may schedule these requests.
        """
        self._kv_peers.worker_down(number)
        waiting = []
        for request in self._live:
            migration = request.migration
            if migration is not None:
                request.migration = migration.without(number)
                if request.migration not in (None, migration):
                    waiting.append(request)
        return waiting

    def _pass_on(
        self, source: Worker, message: m.Migrated, fds: tuple[int, ...]
    ) -> LiveRequest | None:
        request = self._live.get(message.request_id)
        migration = None if request is None else request.migration
        if request is None or migration is None or not migration.expects(MigrationEvent.RELEASED):
            self._decline(source, message)
            return None
        request.migration = migration.after(MigrationEvent.RELEASED)
        if request.migration is None:
            self._decline(source, message)
            return request
        request.device = migration.target
        transfer = message.kv_transfer
        if not self._kv_peers.have_equal_parts(migration.source, migration.target):
            self._decline(source, message)
            transfer, fds = None, ()
        self._kv_peers.register(transfer, migration.source, migration.target)
        order = msgspec.structs.replace(request.order_now(), is_moving=True, kv_transfer=transfer)
        self._workers[migration.target].send(order, fds)
        return None

    def _decline(self, source: Worker, message: m.Migrated) -> None:
        """Release a KV transfer without a reader."""
        if message.kv_transfer is not None:
            source.send(m.ReleaseKvTransfer(message.kv_transfer.transfer_id))


def is_leaving(request: LiveRequest) -> bool:
    """Return whether the source of a migration has not released the request."""
    migration = request.migration
    return migration is not None and migration.expects(MigrationEvent.RELEASED)


class KvPeers:
    """Introduces workers to the host memory of other workers, and releases KV after a read.

    ``transfers`` has the source and the target of each readable KV transfer. A transfer may outlive
    the request.
    """

    def __init__(self, workers: Mapping[int, Worker]) -> None:
        self._workers = workers
        self._introduced: set[tuple[int, int]] = set()  # (source, target)
        self.transfers: dict[str, tuple[int, int]] = {}

    def introduce(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Give each target access to the host memory of each source of coming requests.

        Each pair is introduced once, and only where requests migrate: the target's GPU pins the
        whole host memory, 0.1 s per GB; until then the target gets requests without KV. Groups of
        different sizes are not introduced.
        """
        numbers = list(targets)
        for source in sources:
            for target in numbers:
                if source != target and (source, target) not in self._introduced:
                    self._introduce(source, target)

    def share_prefixes(self, number: int) -> None:
        """Let a new worker and the others read each other's KV of ended requests."""
        worker = self._workers[number]
        for other in self._workers.values():
            if other is not worker and self.have_equal_parts(number, other.number):
                for reader, source in ((other, worker), (worker, other)):
                    if reader.is_ready and source.kv_host_fd is not None:
                        reader.send(m.PrefixPeer(source.number), (source.kv_host_fd,))

    def register(self, transfer: m.KvTransfer | None, source: int, target: int) -> None:
        """Record the KV of a request for the target to read from the source."""
        if transfer is not None:
            self.transfers[transfer.transfer_id] = source, target

    def have_equal_parts(self, source: int, target: int) -> bool:
        """Return whether KV of one worker is of use on the other.

        The ranks of groups of different sizes have different parts of the KV, which is computed
        anew.
        """
        return self._workers[source].device.num_gpus == self._workers[target].device.num_gpus

    def used(self, transfer_id: str) -> None:
        """Release KV without further use by the target."""
        source, _ = self.transfers.pop(transfer_id, (None, None))
        if source is not None:
            self._send(source, m.ReleaseKvTransfer(transfer_id))

    def worker_down(self, number: int) -> None:
        """Release the KV meant for a dead worker; forget the KV of the dead worker."""
        for transfer_id, (source, target) in list(self.transfers.items()):
            if number in (source, target):
                del self.transfers[transfer_id]
            if number == target:
                self._send(source, m.ReleaseKvTransfer(transfer_id))
        for source, target in list(self._introduced):
            if number in (source, target):
                self._introduced.discard((source, target))
            if number == source:
                self._send(target, m.PeerDown(number))

    def _introduce(self, source: int, target: int) -> None:
        worker, to = self._workers.get(source), self._workers.get(target)
        if worker is None or to is None or not (worker.is_ready and to.is_ready):
            return
        if not self.have_equal_parts(source, target):
            return
        ready = worker.ready
        if worker.kv_host_fd is not None and ready is not None and ready.facts.kv_host_limit_bytes:
            to.send(m.PeerHost(source, ready.facts.kv_host_limit_bytes), (worker.kv_host_fd,))
            self._introduced.add((source, target))

    def _send(self, number: int, message: m.Message) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.send(message)
