"""Orders to the workers: each action of the scheduling core becomes a message here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpupool_state import History
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.requests.kv_peers import KvPeers
from gpupoold.control.requests.migrations import Migrations
from gpupoold.control.workers.roles import Roles
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Role
from gpupoold.scheduling.actions import Action, ChangeRole, Migrate, Send, StartTurn
from gpupoold.wire import messages as m


class WorkerOrders:
    """Sends orders to workers by number, and records the worker of each request."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        live: LiveRequests,
        roles: Roles,
        migrations: Migrations,
        kv_peers: KvPeers,
        history: History,
    ) -> None:
        self._workers = workers
        self._live = live
        self._roles = roles
        self._migrations = migrations
        self._kv_peers = kv_peers
        self._history = history

    def carry_out(self, action: Action) -> None:
        """Carry out an action of the scheduling core."""
        match action:
            case Send():
                request = self._live[action.request_id]
                request.device = action.device
                self._workers[action.device].send(request.order_now())
            case StartTurn():
                self._workers[action.device].send(run_turn(action))
            case Migrate():
                request = self._live[action.request_id]
                self._migrations.begin(request, action.source, action.target)
            case ChangeRole():
                self._roles.chosen(action.device, action.role)
                self.introduce_peers()
                device = str(action.device)
                self._history.record_event("info", "role_changed", device, action.role.value)

    def abort(self, requests: Iterable[LiveRequest]) -> None:
        """Stop requests on the workers; the records stay."""
        for one in requests:
            if one.device is not None:
                self._workers[one.device].send(m.AbortRequests(one.model, [one.request_id]))

    def end_isolation(self, request: LiveRequest) -> None:
        """Allow a request to share steps again, if a worker has the request."""
        if request.device is not None and not request.is_isolated:
            message = m.EndIsolation(request.model, request.request_id)
            self._workers[request.device].send(message)

    def introduce_peers(self) -> None:
        """Introduce prefilling workers to decoding workers, before the first migration."""
        with_role: dict[Role, list[int]] = {role: [] for role in Role}
        for number in self._workers:
            with_role[self._roles.of(number)[0]].append(number)
        self._kv_peers.introduce(with_role[Role.PREFILL], with_role[Role.DECODE])


def run_turn(action: StartTurn) -> m.RunTurn | m.EndTurn:
    """Return the message that starts or changes a worker's turn, or ends the turn."""
    turn = action.turn
    if turn is None:
        return m.EndTurn()
    return m.RunTurn(turn.turn_id, turn.model, turn.quota_s, action.then, turn.chunk_tokens)
