"""The requests of a worker: arrival, end and migration, for the turn thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpupoold.errors import GpupoolError, Refused
from gpupoold.memory.host import Slot
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire import messages as m
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.kv.migrations import KvMigrations
from gpupoold.worker.kv.residency import Residency
from gpupoold.worker.turns.ledger import RequestLedger

ALONE_S, GRAMMAR_S = 1.0, 5.0
"""Seconds to wait for other threads to be idle, and for the request's grammar.

Other requests of the worker wait meanwhile.
"""
_POLL_S = 0.001


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

    See :mod:`gpupoold.control.requests.suspects`. The scheduler isolates the requests' steps.
    """
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
