"""Requests between the frontends and the workers: in, out, cancelled, failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus

import msgspec

from gpupool_state import History
from gpupoold.config.schema import LimitSettings
from gpupoold.control.accounting.meters import Meters
from gpupoold.control.accounting.model_stats import ModelStats, SwitchStats
from gpupoold.control.accounting.turns import TurnLog
from gpupoold.control.live_requests import LiveRequest, LiveRequests, request_id_of
from gpupoold.control.processes.crash_attribution import NOBODY, Candidates
from gpupoold.control.requests.admission import Overload, num_bytes_of
from gpupoold.control.requests.core_shell import Scheduler
from gpupoold.control.requests.isolation import Isolation
from gpupoold.control.requests.migrations import Migrations
from gpupoold.control.requests.ports import Keys, Warmth
from gpupoold.control.requests.replies import Replies
from gpupoold.control.requests.rows import finish_reason, request_row, switch_row
from gpupoold.control.requests.silence import waits_for
from gpupoold.control.requests.tokens import TokenCounter
from gpupoold.control.workers.roles import Roles
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import DeviceEvent, FinishReason, Role, Targets
from gpupoold.errors import NoSuchRequest, Refused
from gpupoold.scheduling.costs import ModelCosts
from gpupoold.scheduling.policies.base import CannotServe, Policy
from gpupoold.wire import messages as m

_SAME_ID = "Another request is served by the same id. Please send this one again."


class Dispatcher:
    """All live requests and the routing of messages; one per daemon.

    A request without a token for ``token_timeout_s`` ends. ``routes`` maps the models that accept
    requests to their workers. Requests of a model that is not warm wait here.
    """

    def __init__(
        self,
        limits: LimitSettings,
        history: History,
        policy: Policy,
        roles: Sequence[Role | None] = (),
        keys: Keys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``roles`` are the workers' roles by number; None leaves the choice to the policy.

        ``clock`` returns seconds of the monotonic clock.
        """
        self._clock = clock
        self.token_timeout_s = limits.token_timeout_s
        self._history = history
        self.live = LiveRequests()
        self.replies = Replies(self.live)
        self.stats: dict[str, ModelStats] = {}
        self.switches = SwitchStats()
        self.meters = Meters()
        self.turns = TurnLog()
        self.routes: dict[str, list[Worker]] = {}
        self.targets: dict[str, Targets] = {}
        self._workers: dict[int, Worker] = {}
        self.roles = Roles(roles)
        self.migrations = Migrations(
            self._workers, self.live, self._resumed_order, self._start_anew
        )
        self.scheduler = Scheduler(
            policy, self._send_to, self._on_sent, self._migrate, self._on_role, clock
        )
        self.warmth: Warmth | None = None
        self._waiting: dict[str, dict[str, m.AddRequest]] = {}
        self._orders: dict[str, m.AddRequest] = {}  # of live requests, as they came
        state = self.scheduler.core.core.state
        self._overload = Overload(
            limits,
            history,
            self.live,
            self.stats,
            state,
            self._max_tokens,
            self.meters.refused,
            keys,
        )
        self._keys = keys
        self._tokens = TokenCounter(self.live, self.stats, state, self._charge)
        self.isolation = Isolation(self.live, history, self._start_anew, self._fail, self._send_to)

    def from_frontend(self, message: m.FromFrontend) -> None:
        """A request or a cancellation."""
        match message:
            case m.AddRequest():
                self._add(message)
            case m.AbortRequests():
                self._abort(message)

    def from_worker(self, worker: Worker, message: m.FromWorker) -> None:
        match message:
            case m.StepOutputs():
                self.replies.outputs(message)
                self.turns.stepped(worker.number, message)
                self._note_outputs(worker, message)
            case m.Migrated():
                self.migrations.left(worker, message)
            case m.RequestAttached():
                self._note_attached(message.request_id)
            case m.KvTransferUsed():
                self.migrations.kv_transfer_used(message.transfer_id)
            case m.MemoryReport():
                self.scheduler.memory_changed(worker.number, message)
            case m.TurnReport():
                self.meters.turn_ended(worker.number, message)
                self.turns.ended(worker.number, message)
                self.scheduler.turn_ended(worker.number, message)
            case m.RequestsFailed():
                found = (self.live.get(request_id) for request_id in message.request_ids)
                self._fail([one for one in found if one is not None], message.message)
            case m.WrongAnswer():
                if self.warmth is not None:
                    self.warmth.damaged(message)
            case m.Switched():
                self.scheduler.set_bandwidth(worker.number, message.bandwidth_bytes_per_s)
                self.meters.switched(message.switch)
                self.switches.add(message.switch)
                self._tokens.switched(message.switch)
                self.turns.switched(message.switch)
                self._history.record_switch(switch_row(message.switch))

    def worker_up(self, worker: Worker) -> None:
        """Add a worker, which can now have models and requests."""
        assert worker.ready is not None
        number = worker.number
        self._workers[number] = worker
        self._introduce_peers()
        role, is_fixed = self.roles.of(number)
        self.scheduler.device_up(number, worker.ready, role, is_fixed=is_fixed)
        if self.roles.is_draining(number):
            self.scheduler.set_draining(number, is_draining=True)

    def set_role(self, number: int, role: Role | None, whose: str = "by hand") -> None:
        """Set a worker's role; None leaves the choice to the policy.

        A worker that only prefills migrates its answers. ``whose`` names the origin in the event.
        """
        self.roles.fix(number, role)
        role, is_fixed = self.roles.of(number)
        self._introduce_peers()
        self.scheduler.set_role(number, role, is_fixed=is_fixed)
        self._history.record_event("info", "role_set", str(number), f"{role.value}, {whose}")

    def set_draining(self, number: int, *, is_draining: bool) -> None:
        """Drain a worker, or end the drain."""
        self.roles.drain(number, is_draining=is_draining)
        self.scheduler.set_draining(number, is_draining=is_draining)
        text = "it gets nothing new, its requests go elsewhere" if is_draining else "it has work"
        kind: DeviceEvent = "drain_began" if is_draining else "drain_ended"
        self._history.record_event("info", kind, str(number), text)

    def set_limits(self, limits: LimitSettings) -> None:
        """Set other bounds for future and waiting requests."""
        self.token_timeout_s = limits.token_timeout_s
        self._overload.limits = limits

    def host(
        self, targets: Targets, loaded: m.LoadedModel, costs: ModelCosts | None, worker: Worker
    ) -> None:
        """Route a model's requests to a worker that has loaded the model."""
        name = loaded.name
        self.targets[name] = targets
        self.scheduler.add_model(targets, loaded, costs)
        self.scheduler.host(worker.number, name, costs)
        hosts = self.routes.setdefault(name, [])
        if worker not in hosts:
            hosts.append(worker)

    def unhost(self, name: str, worker: Worker) -> None:
        """Remove a model from a worker without requests of the model."""
        hosts = self.routes.get(name, [])
        if worker in hosts:
            hosts.remove(worker)
            self.scheduler.unhost(worker.number, name)

    def num_waiting(self, name: str) -> int:
        """Return the number of requests that wait until their model is warm."""
        return len(self._waiting.get(name, ()))

    def go_on(self, name: str) -> None:
        """Schedule the requests that waited for a model to be warm."""
        for message in self._waiting.pop(name, {}).values():
            request = self.live.get(message.request_id)
            if request is not None:
                request.warmed_s = self._clock()
            self.scheduler.arrived(message)

    def fail_waiting(self, name: str, reason: str) -> None:
        """Fail the requests that waited for a model that cannot be warmed."""
        waiting = self._waiting.get(name, {})
        self._fail([one for one in self.live.of_model(name) if one.request_id in waiting], reason)
        self._waiting.pop(name, None)

    def check_servable(self) -> None:
        """Raise Refused when the policy cannot serve all the models there are."""
        try:
            self.scheduler.check()
        except CannotServe as error:
            raise Refused(str(error), "remove another model, or choose another policy") from error

    def set_targets(self, name: str, targets: Targets) -> None:
        """New targets, for requests under way too."""
        self.targets[name] = targets
        self.scheduler.set_targets(name, targets)

    def forget(self, name: str) -> None:
        """Remove a model, whose requests have ended before."""
        self.routes.pop(name, None)
        self.targets.pop(name, None)
        self._overload.forget(name)
        self.scheduler.remove_model(name)

    def fail_model(self, model: str, reason: str) -> None:
        """End all live requests of a model with an error."""
        requests = self.live.of_model(model)
        for request in requests:
            self._cancel(request)
        self._fail(requests, reason)

    def cancel(self, request_id: str, reason: str) -> LiveRequest:
        """End a live request with an error for the client; return the request.

        Raises:
            NoSuchRequest: no live request has this id.
        """
        request = self.live.get(request_id_of(request_id))
        if request is None:
            raise NoSuchRequest(
                f"no live request is called {request_id!r}", "it may have ended: see `gpupool top`"
            )
        self._cancel(request)
        self._fail([request], reason)
        return request

    def worker_down(self, worker: Worker, reason: str, candidates: Candidates = NOBODY) -> None:
        """Remove a worker and requeue its requests.

        The ``candidates``, which may have ended the worker, are retried one at a time.
        """
        for workers in self.routes.values():
            if worker in workers:
                workers.remove(worker)
        self.meters.device(worker.number).worker_ended()
        self.turns.worker_down(worker.number)
        lost = self.live.on_device(worker.number)
        gone = [*lost, *self.migrations.lost(worker.number)]
        self.scheduler.device_down(worker.number, [one.request_id for one in gone])
        self.isolation.worker_down(lost, candidates, reason)

    def nums_of_requests(self, numbers: Iterable[int]) -> list[int]:
        """Return the number of live requests per worker: assigned, running or not yet released."""
        had = Counter(request.device for request in self.live)
        return [max(had[number], self.scheduler.num_requests(number)) for number in numbers]

    def fail_unhosted(self, reason: str) -> None:
        """End the waiting requests of models without a worker."""
        self._fail([one for one in self.live.all() if not self.routes.get(one.model)], reason)

    def tick(self, now_s: float) -> None:
        """End requests that are too late, if so configured; to be called every second."""
        late = self._overload.too_late(now_s)
        self._fail(late, "dropped: it had not begun when its first token was due")
        self._overload.tell(now_s)
        self.isolation.go_on(now_s)
        self.scheduler.tick()

    def end_overdue(self, now_s: float) -> None:
        """End the requests without a token for too long, whatever the cause."""
        limit_s = self.token_timeout_s
        silent = self.live.silent_since(now_s - limit_s)
        # All are asked before one ends: those who wait for room get that of those who leave.
        for request, reason in [(one, self._waits_for(one)) for one in silent]:
            self._cancel(request)
            self._fail([request], f"no token for {limit_s:g} s: {reason}")

    def _waits_for(self, request: LiveRequest) -> str:
        return waits_for(
            request,
            is_cold=request.request_id in self._waiting.get(request.model, ()),
            is_held=self.isolation.is_held(request.request_id),
            has_hosts=bool(self.routes.get(request.model)),
            on_turn=self.scheduler.on_turn,
        )

    def frontend_down(self, number: int) -> None:
        """Cancel the requests of an ended frontend, whose answers no client reads."""
        for request in self.live.of_frontend(number):
            self._cancel(request)
            self._end(request.request_id, FinishReason.ABORT)

    def _add(self, message: m.AddRequest) -> None:
        is_warm = self._is_warm(message.model)
        hosts = [worker.number for worker in self.routes.get(message.model, ())]
        is_routed = bool(hosts) and not self.roles.all_draining(hosts)
        if self.live.get(message.request_id) is not None:
            refusal = m.AdmissionAnswer(message.model, message.request_id, 503, _SAME_ID)
            self.replies.send(message.frontend, refusal)
            return
        admission = self._overload.admission(message, is_routed=is_routed, is_warm=is_warm)
        self._charge(message.key_id, message.num_prompt_tokens)
        self.replies.send(message.frontend, admission)
        if admission.status != HTTPStatus.OK:
            return
        targets = self.targets[message.model]
        self.meters.arrived(message, is_warm=is_warm)
        self.stats.setdefault(message.model, ModelStats()).now.requests += 1
        self.live.add(
            LiveRequest(
                message.request_id,
                message.model,
                None,
                message.arrival_s,
                targets,
                message.num_prompt_tokens,
                key_id=message.key_id,
                frontend=message.frontend,
                num_bytes=num_bytes_of(message),
            )
        )
        if self._keys is not None:
            self._keys.used(message.key_id, num_requests=1)
        self._orders[message.request_id] = message
        if self.warmth is not None:
            self.warmth.used(message.model)
        self._schedule(message, is_warm=is_warm)

    def _is_warm(self, model: str) -> bool:
        return self.warmth is None or self.warmth.is_warm(model)

    def _schedule(self, message: m.AddRequest, *, is_warm: bool) -> None:
        """Pass a request to the core, or hold the request until its model is warm."""
        if self.warmth is not None and not is_warm:
            self._waiting.setdefault(message.model, {})[message.request_id] = message
            self.warmth.begin(message.model)
            return
        self.scheduler.arrived(message)

    def _start_anew(self, request: LiveRequest) -> None:
        """Schedule a request without a worker again, to continue after its tokens."""
        request.device = None
        self.meters.model(request.model).resumed += 1
        self._schedule(self._resumed_order(request), is_warm=self._is_warm(request.model))

    def _resumed_order(self, request: LiveRequest) -> m.AddRequest:
        order, token_ids = self._orders[request.request_id], list(request.output_token_ids)
        alone = self.isolation.is_isolated(request.request_id)
        return msgspec.structs.replace(order, output_token_ids=token_ids, is_isolated=alone)

    def _migrate(self, request_id: str, source: int, target: int) -> None:
        request = self.live.get(request_id)
        if request is not None:
            self.migrations.begin(request, source, target)

    def _note_attached(self, request_id: str) -> None:
        request = self.migrations.attached(request_id)
        if request is not None:
            self.scheduler.attached(request_id, len(request.output_token_ids))

    def _on_role(self, number: int, role: Role) -> None:
        self.roles.chosen(number, role)
        self._introduce_peers()
        self._history.record_event("info", "role_changed", str(number), role.value)

    def _introduce_peers(self) -> None:
        """Introduce prefilling workers to decoding workers, before the first migration."""
        with_role: dict[Role, list[int]] = {role: [] for role in Role}
        for number in self._workers:
            with_role[self.roles.of(number)[0]].append(number)
        self.migrations.introduce(with_role[Role.PREFILL], with_role[Role.DECODE])

    def _send_to(
        self, number: int, message: m.AddRequest | m.RunTurn | m.EndTurn | m.EndIsolation
    ) -> None:
        self._workers[number].send(message)

    def _on_sent(self, request_id: str, number: int) -> None:
        request = self.live.get(request_id)
        if request is not None:
            request.device = number

    def _max_tokens(self, request_id: str) -> int | None:
        order = self._orders.get(request_id)
        return None if order is None else order.max_tokens

    def _abort(self, message: m.AbortRequests) -> None:
        for request_id in message.request_ids:
            request = self.live.get(request_id)
            if request is not None:
                self._cancel(request)
                self._end(request_id, FinishReason.ABORT)

    def _cancel(self, request: LiveRequest) -> None:
        """Tell the request's worker to stop; the record ends separately."""
        if request.device is None:
            return
        abort = m.AbortRequests(request.model, [request.request_id])
        self._workers[request.device].send(abort)

    def _note_outputs(self, worker: Worker, message: m.StepOutputs) -> None:
        self._tokens.stepped(worker.number, message)
        self.scheduler.stepped(worker.number, message)
        for item in message.progress:
            if item.finish_reason is not None:
                self._record_end(item.request_id, finish_reason(item.finish_reason))
        self.isolation.progressed(message)

    def _fail(self, requests: list[LiveRequest], reason: str) -> None:
        self.replies.failed(requests, reason)
        for request in requests:
            self._end(request.request_id, FinishReason.ERROR, reason)

    def _end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        request = self.live.get(request_id)
        waiting = self._waiting.get(request.model, {}) if request is not None else {}
        if waiting.pop(request_id, None) is None:
            self.scheduler.ended(request_id)
        self._record_end(request_id, reason, error)

    def _record_end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        request = self.live.pop(request_id)
        if request is None:
            return
        del self._orders[request_id]
        self.migrations.ended(request_id)
        self.isolation.ended(request, reason)
        self.meters.model(request.model).finished[reason] += 1
        self.stats[request.model].end(reason)
        self._history.record_request(request_row(request, reason, error))
        if self._keys is not None:
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            self._keys.used(request.key_id, num_tokens=num_tokens)
        if self.warmth is not None:
            self.warmth.left(request.model)

    def _charge(self, key_id: str, num_tokens: int) -> None:
        if self._keys is not None:
            self._keys.charge(key_id, num_tokens)
