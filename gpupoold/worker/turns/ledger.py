"""A worker's records: its requests, for the order of eviction, and the daemon's orders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpupoold.domain import Targets
from gpupoold.errors import GpupoolError, Refused
from gpupoold.memory.host import Slot
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire import messages as m
from gpupoold.wire.messages import RunTurn
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.kv.migrations import KvMigrations
from gpupoold.worker.kv.residency import Residency

ALONE_S, GRAMMAR_S = 1.0, 5.0
"""Seconds to wait for other threads to be idle, and for the request's grammar.

Other requests of the worker wait meanwhile.
"""
_POLL_S = 0.001


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
