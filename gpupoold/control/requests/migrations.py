"""Migrations of requests from one worker to another.

The *source* gets the order to release a request. The source answers when the copy of the KV to its
host memory has begun, and the *target* gets the request with the place of the KV. Then the source
is no longer needed: if the source dies, the target recomputes missing KV. If the target dies, the
request restarts from the tokens so far like any request of a dead worker.

:class:`gpupoold.control.live_requests.Migration` has the phases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from gpupoold.control.live_requests import LiveRequest, LiveRequests, Migration, MigrationEvent
from gpupoold.control.requests.kv_peers import KvPeers
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
