"""Requests between the frontends and the workers: in, out, cancelled, failed."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from http import HTTPStatus

from gpupool_state import History
from gpupoold.api.request_ids import is_request
from gpupoold.config.schema import Settings
from gpupoold.config.sections import LimitSettings
from gpupoold.control.access import Keyring
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.live_requests import (
    LiveRequest,
    LiveRequests,
    Replies,
    RequestListener,
    waits_for,
)
from gpupoold.control.processes.supervised import NOBODY, Candidates
from gpupoold.control.requests.accounts import Accounts, finish_reason
from gpupoold.control.requests.admission import Overload
from gpupoold.control.requests.core_shell import (
    CoreShell,
    Isolation,
    WorkerOrders,
    arrived,
    bandwidth_measured,
    cut_short,
    device_up,
    memory_changed,
    model_added,
    stepped,
)
from gpupoold.control.requests.migrations import KvPeers, Migrations, is_leaving
from gpupoold.control.workers.worker import Roles, Worker, configured_roles
from gpupoold.domain import BACKGROUND_TTFT_S, FinalFailure, FinishReason, ModelSpec, Role, Targets
from gpupoold.errors import NoSuchRequest, Refused
from gpupoold.event_kinds import DeviceEvent
from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import has_room
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.base import CannotServe, Policy
from gpupoold.scheduling.state import State
from gpupoold.wire import messages as m

_SAME_ID = "A live request has the same id. Please send the request again."


class Dispatcher:
    """All live requests, from arrival to end; one object per daemon.

    The scheduling core in ``shell`` decides; ``state`` is the core's state, for reading.
    :class:`WorkerOrders` sends the decisions to the workers, :class:`Replies` writes to the
    frontends, :class:`Accounts` counts. ``listener`` manages the models; set the attribute before
    the first request. A request without a token for ``token_timeout_s`` ends.
    """

    def __init__(
        self,
        settings: Settings,
        history: History,
        policy: Policy,
        fleet: Fleet,
        send: Callable[[int, m.Message], None],
        keys: Keyring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` takes a frontend's number and a message; ``clock`` returns seconds."""
        self._clock = clock
        self._history = history
        self._fleet = fleet
        self.token_timeout_s = settings.limits.token_timeout_s
        self.live = live = LiveRequests()
        self.replies = Replies(live, send)
        self.roles = Roles(configured_roles(settings))
        self._workers: dict[int, Worker] = {}
        self.kv_peers = peers = KvPeers(self._workers)
        self.migrations = Migrations(self._workers, live, peers)
        self._orders = WorkerOrders(
            self._workers, live, self.roles, self.migrations, peers, history
        )
        self.shell = CoreShell(policy, self._orders.carry_out, clock)
        self.state = state = self.shell.core.state
        self._background = BackgroundQueue(live, state, self._begin)
        self.accounts = Accounts(history, live, state, keys, clock)
        stats, refused = self.accounts.stats, self.accounts.meters.refused
        self._overload = Overload(settings.limits, history, live, stats, state, refused, keys)
        self.isolation = Isolation(live, history, self._orders)
        self.listener = RequestListener()
        # The readers of a worker's step in order, each with the reason for a place before the next.
        self.output_readers: tuple[Callable[[int, m.StepOutputs], None], ...] = (
            # No count delays a token. A first token is known as such until it is counted.
            self._reply,
            # The core's turn and batch, which date a token, are the ones that made the token.
            self.accounts.stepped,
            # The core decides while the records of its requests exist, and before the listener
            # learns of ends.
            self._advance_core,
            # An ended request is removed as whole, and is no suspect that could be cleared.
            self._remove_ended,
            # Trials of suspects begin before background requests take the time.
            self._clear_suspects,
            self._fill_background,
        )

    def from_frontend(self, message: m.FromFrontend) -> None:
        """Handle a request or a cancellation."""
        match message:
            case m.AddRequest():
                self._add(message)
            case m.AbortRequests():
                self._abandon(self._known(message.request_ids))

    def from_worker(self, worker: Worker, message: m.FromWorker) -> None:
        match message:
            case m.StepOutputs():
                for read in self.output_readers:
                    read(worker.number, message)
            case m.Migrated():
                request = self.migrations.released(worker, message)
                if request is not None:
                    self._restart(request)
            case m.RequestAttached():
                request = self.migrations.attached(message.request_id, self._clock())
                if request is not None:
                    num_tokens = len(request.output_token_ids)
                    self.shell.handle(e.Attached(request.request_id, num_tokens))
            case m.KvTransferUsed():
                self.kv_peers.used(message.transfer_id)
            case m.ModelLoaded():
                self._restart_dropped(worker, message.dropped)
            case m.MemoryReport():
                worker.missing_bytes |= message.missing_bytes
                self.shell.handle(memory_changed(worker.number, message))
            case m.TurnReport():
                worker.missing_bytes |= message.missing_bytes
                self.accounts.turn_ended(worker.number, message)
                changed = memory_changed(worker.number, message)
                self.shell.handle(changed, e.TurnEnded(worker.number, message.turn_id))
            case m.RequestsFailed():
                self._failed_there(message)
            case m.WrongAnswer():
                self.listener.weights_damaged(message)
            case m.Switched():
                used = bandwidth_measured(self.state, worker.number, message.bandwidth_bytes_per_s)
                self.shell.handle(*used)
                self.accounts.switched(message.switch)

    def worker_up(self, worker: Worker) -> None:
        """Add a worker for models and requests."""
        assert worker.ready is not None
        number = worker.number
        self._workers[number] = worker
        self.kv_peers.share_prefixes(number)
        self._orders.introduce_peers()
        role, is_fixed = self.roles.of(number)
        self.shell.handle(device_up(number, worker.ready, role, is_fixed=is_fixed))
        if self._fleet.is_device_draining(number):
            self.shell.handle(e.DrainSet(number, is_draining=True))

    def set_role(self, number: int, role: Role | None, whose: str = "by hand") -> None:
        """Set a worker's role; None leaves the choice to the policy.

        A prefilling worker migrates all answers. ``whose`` names the origin in the event.
        """
        self.roles.fix(number, role)
        role, is_fixed = self.roles.of(number)
        self._orders.introduce_peers()
        self.shell.handle(e.RoleSet(number, role, is_fixed))
        self._history.record_event("info", "role_set", str(number), f"{role.value}, {whose}")

    def set_draining(self, number: int, *, is_draining: bool) -> None:
        """Drain a worker, or end the drain."""
        self._fleet.drain_device(number, is_draining=is_draining)
        self.shell.handle(e.DrainSet(number, is_draining))
        kind: DeviceEvent = "drain_began" if is_draining else "drain_ended"
        drains = "no new requests; running requests end or migrate"
        text = drains if is_draining else "accepts new requests"
        self._history.record_event("info", kind, str(number), text)

    def set_limits(self, limits: LimitSettings) -> None:
        """Set other bounds for future and waiting requests."""
        self.token_timeout_s = limits.token_timeout_s
        self._overload.limits = limits

    def host(
        self, targets: Targets, loaded: m.LoadedModel, costs: ModelCosts | None, worker: Worker
    ) -> None:
        """Allow requests of a loaded model on a worker."""
        self.shell.handle(model_added(targets, loaded, costs))
        self._hosted(loaded.name, costs, worker)
        self._fleet.host(loaded, worker.number)

    def _hosted(self, name: str, costs: ModelCosts | None, worker: Worker) -> None:
        self.shell.handle(e.Hosted(worker.number, name, costs))
        # The core ignores reports about a model that it does not know yet.
        if (missing := worker.missing_bytes.get(name)) is not None:
            self.shell.handle(e.MemoryChanged(worker.number, ((name, missing),)))

    def unhost(self, name: str, worker: Worker) -> None:
        """Remove a model from a worker without requests of the model."""
        if worker.number in self._fleet.availability(name).devices:
            self._fleet.unhost(name, worker.number)
            self.shell.handle(e.Unhosted(worker.number, name))
            self._wake_asleep()

    def rest(self, name: str, number: int) -> None:
        """Send no requests of a model to a device without the snapshot, while others serve."""
        self._fleet.snapshots.rest(name, number)
        self.shell.handle(e.Unhosted(number, name))

    def wake(self, name: str, worker: Worker) -> None:
        """Send requests again to a resting device that has the snapshot."""
        number = worker.number
        if number in self._fleet.snapshots.resting(name):
            self._fleet.snapshots.wake(name, number)
            speed = self.state.models[name].speed(self.state.devices[number].up.kind)
            self._hosted(name, speed.costs, worker)

    def evict(self, name: str, worker: Worker) -> None:
        """Remove an idle model from a worker, for another model's engine."""
        if worker.number in self._fleet.availability(name).devices:
            self._fleet.unhost(name, worker.number, is_evicted=True)
            self.shell.handle(e.Unhosted(worker.number, name))

    def withdraw(self, name: str, worker: Worker, *, is_evicted: bool = False) -> list[LiveRequest]:
        """Remove a model from a worker; return the requests there, to be passed to ``go_elsewhere``
        when the worker has unloaded the model. With ``is_evicted`` for another model's engine.

        Raises Refused: a request is migrating from or to the worker.
        """
        number = worker.number
        requests = self.live.of_model(name)
        if any(request.migration and request.migration.concerns(number) for request in requests):
            raise Refused(f"requests of {name} are migrating from or to device {number}")
        here = [request for request in requests if request.device == number]
        self.shell.handle(*cut_short(here))
        self._orders.abort(here)
        (self.evict if is_evicted else self.unhost)(name, worker)
        return here

    def go_elsewhere(self, requests: Iterable[LiveRequest], worker: Worker) -> None:
        """Continue requests of :meth:`withdraw` on other workers, after all tokens so far."""
        for request in requests:
            is_live = self.live.get(request.request_id) is request
            if is_live and request.device == worker.number:
                self._restart(request)

    def go_on(self, name: str) -> None:
        """Schedule the waiting requests of a model that has become warm."""
        for request in self._cold(name):
            self.live.set_cold(request, is_cold=False)
            request.warmed_s = self._clock()
            self._arrive(request)

    def fail_waiting(self, name: str, reason: str) -> None:
        """Fail the waiting requests of a model after a failure to warm the model."""
        self._fail(self._cold(name), reason)

    def check_servable(self) -> None:
        """Raise Refused when the policy cannot serve all present models."""
        try:
            self.shell.core.policy.check(self.state)
        except CannotServe as error:
            raise Refused(str(error), "remove another model, or choose another policy") from error

    def changed(self, spec: ModelSpec) -> None:
        """Apply the targets of a changed model, also to requests under way."""
        self._fleet.changed(spec)
        name, targets = spec.name, spec.targets
        for number in self._devices(name):
            self._workers[number].send(m.SetTargets(name, targets.ttft_s, targets.tbt_s))
        if name in self.state.models:
            self.shell.handle(e.TargetsChanged(name, targets))

    def forget(self, name: str) -> None:
        """Remove a model without live requests from all workers."""
        self._fleet.unhost_all(name)
        self._overload.forget(name)
        self.shell.handle(e.ModelRemoved(name))

    def fail_model(self, model: str, reason: str) -> None:
        """End all live requests of a model with an error."""
        self._stop(self.live.of_model(model), reason)

    def fail_name(self, name: str, reason: str) -> None:
        """End all live requests counted under a name with an error."""
        self._stop(self.live.of_name(name), reason)

    def cancel(self, request_id: str, reason: str) -> list[LiveRequest]:
        """End a live request, or all of a client's request, with an error; return the ended."""
        found = [each for each in self.live.all() if is_request(each.request_id, request_id)]
        if not found:
            raise NoSuchRequest(
                f"no live request has the id {request_id!r}",
                "the request may have ended: see `gpupool top`",
            )
        self._stop(found, reason, FinalFailure.CANCELLED)
        return found

    def worker_down(self, worker: Worker, reason: str, candidates: Candidates = NOBODY) -> None:
        """Remove a worker, and restart the requests there.

        The ``candidates`` for the cause are retried one at a time.
        """
        self._fleet.lose_device(worker.number)
        self.accounts.worker_down(worker.number)
        lost = self.live.on_device(worker.number)
        gone = [*lost, *self.migrations.worker_down(worker.number)]
        # One call: between two calls the core would send further requests to the worker.
        self.shell.handle(*cut_short(gone), e.DeviceDown(worker.number))
        convicted = self.isolation.worker_down(lost, candidates)
        for request in lost:
            if not request.is_held and request not in convicted:
                self._restart(request)
        text = f"the request crashed a second worker when retried alone: {reason}"
        self._fail(convicted, text, FinalFailure.CRASHED_WORKER)
        for request in convicted:
            self.isolation.convicted(request)
            self.listener.convicted(request.model, request.request_id)
        self._wake_asleep()
        self._try_suspects(self._clock())

    def nums_of_requests(self, numbers: Iterable[int]) -> list[int]:
        """Return the number of live requests per worker: assigned, running or not yet released."""
        had = Counter(request.device for request in self.live)
        known = {device.number: device.num_requests for device in self.state.devices.values()}
        return [max(had[number], known.get(number, 0)) for number in numbers]

    def fail_unhosted(self, reason: str) -> None:
        """End the waiting requests of models without a worker, unless another worker can load."""
        if not any(worker.is_ready for worker in self._workers.values()):
            self._fail([each for each in self.live.all() if not self._devices(each.model)], reason)

    def tick(self, now_s: float) -> None:
        """End late requests if configured, and start trials; to be called every second."""
        late = self._overload.too_late(now_s)
        self._fail(late, "dropped: the request had not begun when the first token was due")
        self._overload.report(now_s)
        self._try_suspects(now_s)
        if self.state.requests:
            self.shell.handle(e.Tick())
        self._background.fill()

    def end_overdue(self, now_s: float) -> None:
        """End all requests without a token for ``token_timeout_s``."""
        limit_s = self.token_timeout_s
        silent = self.live.silent_since(now_s - limit_s)
        # All reasons are computed before the first end, which may free memory for other requests.
        waits = [(each, self._waits_for(each)) for each in silent if not each.is_background]
        for request, reason in waits:
            self._stop([request], f"no token for {limit_s:g} s: {reason}")

    def frontend_down(self, number: int) -> None:
        """Cancel the requests of an ended frontend."""
        self._abandon(self.live.of_frontend(number))

    def _add(self, message: m.AddRequest) -> None:
        is_warm = self._fleet.is_warm(message.model)
        is_routed = self._fleet.availability(message.model).takes_requests
        if self.live.get(message.request_id) is not None:
            refusal = m.AdmissionAnswer(message.model, message.request_id, 503, _SAME_ID)
            self.replies.send(message.frontend, refusal)
            return
        admission = self._overload.admission(
            message, self._clock(), is_routed=is_routed, is_warm=is_warm
        )
        if not message.is_background:
            self.accounts.charge(message.key_id, message.num_prompt_tokens)
        self.replies.send(message.frontend, admission)
        if admission.status != HTTPStatus.OK:
            return
        targets = self._fleet.targets(message.model, message.served_name)
        if message.is_background:
            targets = replace(targets, ttft_s=BACKGROUND_TTFT_S)
        request = LiveRequest(message, targets, output_token_ids=list(message.output_token_ids))
        self.live.add(request)
        self.accounts.admitted(message, is_warm=is_warm)
        self.listener.request_began(message.model)
        self._schedule(request, is_warm=is_warm)

    def _failed_there(self, message: m.RequestsFailed) -> None:
        """End requests that a worker has ended; remember a grammar that was the cause."""
        requests = self._known(message.request_ids)
        self._fail(requests, message.message, FinalFailure(message.code) if message.code else None)
        for key_id in {request.key_id for request in requests} if message.grammar else ():
            refused = m.GrammarRefused(message.model, key_id, message.grammar, message.message)
            self.listener.grammar_refused(refused)

    def _wake_asleep(self) -> None:
        """Ask for the snapshots of models with requests whose devices all rest."""
        for name in self._fleet.asleep():
            if self.live.num_of(name):
                self.listener.weights_wanted(name)

    def _known(self, request_ids: Iterable[str]) -> list[LiveRequest]:
        found = (self.live.get(request_id) for request_id in request_ids)
        return [request for request in found if request is not None]

    def _devices(self, model: str) -> tuple[int, ...]:
        return self._fleet.availability(model).devices

    def _schedule(self, request: LiveRequest, *, is_warm: bool) -> None:
        """Pass a request to the core, or hold the request until the model is warm.

        A background request also waits for a device with time to spare.
        """
        if is_warm:
            self._arrive(request)
            return
        self.live.set_cold(request, is_cold=True)
        self.listener.weights_wanted(request.model)

    def _arrive(self, request: LiveRequest) -> None:
        if request.is_background:
            self._background.add(request)
        else:
            self._begin(request)

    def _begin(self, request: LiveRequest) -> None:
        self.shell.handle(arrived(request))

    def _restart(self, request: LiveRequest) -> None:
        """Schedule a request again after the loss of the worker; the tokens so far are kept."""
        request.device = None
        self.accounts.meters.models[request.model].resumed += 1
        self._schedule(request, is_warm=self._fleet.is_warm(request.model))

    def _restart_dropped(self, worker: Worker, request_ids: Iterable[str]) -> None:
        """Send requests again whose engine on ``worker`` has been replaced.

        Requests that are migrating from the worker continue on their target.
        """
        dropped = [
            request
            for request in self._known(request_ids)
            if request.device == worker.number and not is_leaving(request)
        ]
        self.shell.handle(*cut_short(dropped))
        for request in dropped:
            self._restart(request)

    def _try_suspects(self, now_s: float) -> None:
        """Start the next trial of a suspect unless a trial is under way."""
        while (request := self.isolation.next_trial(now_s)) is not None:
            self._restart(request)

    def _cold(self, model: str) -> list[LiveRequest]:
        return [request for request in self.live.of_model(model) if request.is_cold]

    def _waits_for(self, request: LiveRequest) -> str:
        has_hosts = bool(self._devices(request.model))
        return waits_for(request, self.state, has_hosts=has_hosts)

    def _reply(self, number: int, message: m.StepOutputs) -> None:
        """Send the tokens to the frontends, after the waits for first tokens."""
        for frontend, firsts in self.accounts.first_tokens(number, message).items():
            self.replies.send(frontend, m.FirstTokens(firsts))
        self.replies.outputs(message)

    def _advance_core(self, number: int, message: m.StepOutputs) -> None:
        self.shell.handle(*stepped(number, message))

    def _remove_ended(self, number: int, message: m.StepOutputs) -> None:
        for item in message.progress:
            if item.finish_reason is not None:
                self._remove(item.request_id, finish_reason(item.finish_reason))

    def _clear_suspects(self, number: int, message: m.StepOutputs) -> None:
        self._report_answered(self.isolation.progressed(message))
        self._try_suspects(self._clock())

    def _fill_background(self, number: int, message: m.StepOutputs) -> None:
        if any(item.finish_reason is not None for item in message.progress):
            self._background.fill()

    def _stop(
        self, requests: list[LiveRequest], reason: str, final: FinalFailure | None = None
    ) -> None:
        """End requests with an error, also on the workers."""
        self._orders.abort(requests)
        self._fail(requests, reason, final)

    def _abandon(self, requests: list[LiveRequest]) -> None:
        """End requests without a client."""
        self._orders.abort(requests)
        self._end(requests, FinishReason.ABORT)

    def _fail(
        self, requests: list[LiveRequest], reason: str, final: FinalFailure | None = None
    ) -> None:
        """End requests with an error; no worker has any of the requests."""
        self.replies.failed(requests, reason, final)
        self._end(requests, FinishReason.ERROR, reason)

    def _end(self, requests: list[LiveRequest], reason: FinishReason, error: str = "") -> None:
        self.shell.handle(*cut_short(each for each in requests if not each.is_cold))
        for request in requests:
            self._remove(request.request_id, reason, error)

    def _report_answered(self, requests: Sequence[LiveRequest]) -> None:
        """Report crashes that count for a model now, then ``requests``, which closes breakers."""
        for model in self.isolation.take_attributed() if requests else ():
            self.listener.acquitted(model)
        for request in requests:
            self._fleet.breakers.answered(request.model)

    def _remove(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        """Remove the record of a request after the end in the core."""
        request = self.live.pop(request_id)
        if request is None:
            return
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self.isolation.ended(request, is_whole=is_whole)
        if is_whole:
            self._report_answered([request])
        self.accounts.ended(request, reason, error)
        self.listener.request_ended(request.model, request.device)


class BackgroundQueue:
    """Waiting background requests by model; ``pass_on`` gives a request to the core.

    A request that has ended meanwhile is dropped when its turn comes.
    """

    def __init__(
        self, live: LiveRequests, state: State, pass_on: Callable[[LiveRequest], None]
    ) -> None:
        self._live = live
        self._state = state
        self._pass_on = pass_on
        self._waiting: defaultdict[str, deque[LiveRequest]] = defaultdict(deque)

    def add(self, request: LiveRequest) -> None:
        self._waiting[request.model].append(request)
        self.fill()

    def fill(self) -> None:
        """Pass on requests while devices have room; the models take turns."""
        models = deque(self._waiting)
        while models:
            name = models.popleft()
            request = self._next(name)
            model = self._state.models.get(name)
            if request is None or model is None:
                continue
            order = request.order
            if has_room(self._state, model, order.num_prompt_tokens, order.max_tokens):
                self._waiting[name].popleft()
                self._pass_on(request)
                models.append(name)

    def _next(self, name: str) -> LiveRequest | None:
        """Return the oldest waiting request of a model that is still live."""
        queue = self._waiting[name]
        while queue and self._live.get(queue[0].request_id) is not queue[0]:
            queue.popleft()
        if queue:
            return queue[0]
        del self._waiting[name]
        return None
