"""The controller of models: wakes lead to decisions, decisions to steps, and steps to wakes.

Nothing else loads, warms, opens or moves models. All waits are data: the steps under way, the next
tries after failures, and what a model waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from gpupool_state import ModelRow
from gpupoold.control.fleet.states import HostPhase, ModelPhase
from gpupoold.control.models.devices import EngineRoom
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.perform import Failures, Performer
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.models.steps import (
    STARTING_S,
    Cause,
    Decision,
    EnginesFull,
    FailureVerdict,
    HostingPlan,
    HostState,
    ModelStep,
    ModelView,
    StepKind,
    desired,
    next_steps,
    verdict,
)
from gpupoold.control.weights.cache import CacheFull
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.errors import Failed, GpupoolError, NoSuchModel, Refused, TimedOut, Unavailable
from gpupoold.scheduling.hosting import HOSTABLE_PERIOD_S, HostingDevice

_logger = logging.getLogger(__name__)

# Waits after failed steps: the first wait, doubled with each failure of the step.
_FIRST_WAIT_S = 10.0
_MAX_WAIT_S = 600.0
# The wait after a step that other models or migrations were in the way of.
_SHORT_WAIT_S = 1.0


@dataclass(slots=True)
class _Lane:
    """What the controller knows of a model beyond the fleet's records.

    ``waits`` has the latest wait and the time of the next try by the key of a failed step.
    ``blocked`` are the devices whose loads wait for other steps. ``added``, ``warm``, ``replaced``,
    ``removed`` and ``settled`` are the clients that wait.
    ``engine`` are the options that the engines get for a user, who registers the options later.
    """

    steps: dict[ModelStep, asyncio.Task[None]] = field(default_factory=dict)
    waits: dict[str, tuple[float, float]] = field(default_factory=dict)
    waits_since_s: float | None = None
    blocked: frozenset[int] = frozenset()
    expected_bytes: int = 0
    engine: dict[str, str] | None = None
    is_added: bool = False
    added: list[asyncio.Future[None]] = field(default_factory=list)
    warm: list[asyncio.Future[None]] = field(default_factory=list)
    replaced: list[asyncio.Future[None]] = field(default_factory=list)
    removed: list[asyncio.Future[None]] = field(default_factory=list)
    settled: list[asyncio.Future[None]] = field(default_factory=list)
    errors: list[list[GpupoolError]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        waiting = any(self.clients) or self.removed or self.settled
        return not (self.steps or self.is_added or waiting)

    @property
    def clients(self) -> tuple[list[asyncio.Future[None]], ...]:
        """The clients that are told of failures, and of a removal by another client."""
        return self.added, self.warm, self.replaced

    def wished(self, row: ModelRow) -> ModelRow:
        """Return the model with the options that its engines get."""
        engine = row.spec.engine if self.engine is None else self.engine
        return replace(row, spec=replace(row.spec, engine=engine))

    def note(self, error: GpupoolError) -> None:
        """Keep a failure for the clients that wait until the model is settled."""
        for errors in self.errors:
            errors.append(error)

    def postpone(self, step: ModelStep, now_s: float, *, is_short: bool) -> None:
        """Delay the next try of a failed step."""
        last_s, _ = self.waits.get(step.key, (0.0, 0.0))
        wait_s = _SHORT_WAIT_S if is_short else min(max(_FIRST_WAIT_S, 2 * last_s), _MAX_WAIT_S)
        self.waits[step.key] = (last_s if is_short else wait_s), now_s + wait_s


class ModelController(ModelPart):
    """Keeps models where the scheduling core wants them, and publishes their states."""

    def __init__(
        self,
        parts: ControlParts,
        snapshots: ModelSnapshots,
        room: EngineRoom,
        mounts: ModelMounts,
        failures: Failures,
        performer: Performer,
    ) -> None:
        super().__init__(parts)
        self._snapshots = snapshots
        self._room = room
        self._mounts = mounts
        self._failures = failures
        self._performer = performer
        self._lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        self._order: dict[str, int] = {}
        self._new: set[int] = set()  # workers that load the models of their start
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_hostable_s = -math.inf
        self._has_stopped = False
        self._counted: list[HostingDevice] | None = None  # in a round of decisions

    def start(self) -> None:
        """Begin to decide on woken models."""
        self._keep(self._run())
        self._keep(self._follow_memory())

    def check(self, now_s: float) -> None:
        """Decide anew on all models; to be called every second."""
        for model in self._fleet.breakers.due(now_s):
            self._fleet.breakers.half_open(model)
            self._lanes[model].waits.clear()
        if now_s >= self._next_hostable_s:
            self._next_hostable_s = now_s + HOSTABLE_PERIOD_S
            self._keep(self._room.plan_homes())
        # Lanes of removed models are forgotten.
        self._fleet.wake(*self._fleet.names(), *self._lanes)

    async def worker_up(self, worker: Worker) -> None:
        """Let a new worker load the registered models that it should host."""
        self._new.discard(worker.number)
        self._history.record_event("info", "worker_ready", str(worker.number), "ready")
        self._dispatcher.worker_up(worker)
        rows = await self._snapshots.start_order()
        self._order = {str(row.spec.name): index for index, row in enumerate(rows)}
        await self._snapshots.restore(rows, worker)
        for row in rows:
            if not self._fleet.knows(row.spec.name):  # removed meanwhile
                self._snapshots.drop(row.spec.name)
        for lane in self._lanes.values():
            lane.waits.pop(ModelStep(StepKind.LOAD, worker.number).key, None)
        self._new.add(worker.number)
        self._fleet.wake(*self._order)

    async def add(self, name: str, expected_bytes: int) -> None:
        """Return when a model that a client adds is open on a first device.

        The model counts as being added until :meth:`end_addition`. Raises GpupoolError: no device
        could load the model, or no frontend mount the API; the caller removes the model.
        """
        lane = self._lanes[name]
        lane.is_added, lane.expected_bytes = True, expected_bytes
        lane.waits.clear()
        await self._wait(name, lane.added)

    def end_addition(self, name: str) -> None:
        """Treat the model like all others from now on."""
        self._lanes[name].is_added, self._lanes[name].expected_bytes = False, 0
        self._fleet.wake(name)

    async def warm(self, name: str) -> None:
        """Return when the model is open and warm; a model without a device is loaded.

        Raises GpupoolError: the reason of the failure.
        """
        self._lanes[name].waits.clear()
        await self._wait(name, self._lanes[name].warm)

    async def settle(self, name: str) -> list[GpupoolError]:
        """Return when no step of the model is under way or due; return the failures meanwhile.

        Workers that start for the first time are waited for.
        """
        supervisor = self._supervisor
        starting = [supervisor.wait_ready(supervisor.workers[n]) for n in self._starting()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTING_S):
                await asyncio.gather(*starting, return_exceptions=True)
        lane, errors = self._lanes[name], list[GpupoolError]()
        lane.errors.append(errors)
        try:
            await self._wait(name, lane.settled)
        finally:
            lane.errors = [other for other in lane.errors if other is not errors]
        return errors

    async def remove(self, name: str, reason: str) -> None:
        """Return when a model has left all devices, and is forgotten with its snapshots.

        Raises TimedOut: a worker did not answer.
        """
        self.abandon(name, reason)
        await self._wait(name, self._lanes[name].removed)

    async def replace(self, name: str, engine: dict[str, str]) -> None:
        """Return when all engines of a model have the options ``engine``.

        The caller changes the model for a user, and then registers the options. Raises
        GpupoolError: an engine was not replaced; the next try follows.
        """
        lane = self._lanes[name]
        kept = [wait for wait in lane.waits.items() if not wait[0].startswith(StepKind.REPLACE)]
        lane.waits, lane.engine = dict(kept), engine
        try:
            await self._wait(name, lane.replaced)
        finally:
            lane.engine = None

    def abandon(self, name: str, reason: str) -> None:
        """Cancel the steps of a model that do not take the model off devices."""
        lane = self._lanes[name]
        self._raise(lane, Failed(f"{name} {reason}"))
        for step, task in lane.steps.items():
            if step.kind not in (StepKind.EVICT, StepKind.WITHDRAW, StepKind.REMOVE):
                task.cancel()

    def is_added(self, name: str) -> bool:
        return self._lanes[name].is_added

    async def stop(self) -> None:
        """Abandon all steps; the workers have stopped before."""
        self._has_stopped = True
        steps = [task for lane in self._lanes.values() for task in lane.steps.values()]
        for task in (*self._tasks, *steps):
            task.cancel()
        for lane in self._lanes.values():
            for waiters in (*lane.clients, lane.removed, lane.settled):
                for waiter in waiters:
                    waiter.cancel()
        await asyncio.gather(*self._tasks, *steps, return_exceptions=True)

    def wanted(self, model: str) -> None:
        """Bring the weights at once, also after a failure; loads and replacements wait further."""
        lane, kept = self._lanes[model], (StepKind.LOAD, StepKind.REPLACE)
        lane.waits = {key: wait for key, wait in lane.waits.items() if key.startswith(kept)}
        self._fleet.wake(model)

    def began(self, model: str) -> None:
        """Record a use; resting devices may serve again."""
        self._snapshots.touch(model)
        if self._fleet.snapshots.resting(model):
            self._fleet.wake(model)

    def ended(self, model: str, device: int | None) -> None:
        """Record the end of a request, which other models may have waited for."""
        self._snapshots.touch(model, device)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Decide anew on the models that somebody waits for, since memory may have become free."""
        waiting = [
            name
            for name, lane in self._lanes.items()
            if lane.waits_since_s is not None
            and (lane.added or lane.warm or self._dispatcher.live.num_of(name))
        ]
        if waiting:
            self._fleet.wake(*waiting)

    async def _follow_memory(self) -> None:
        """Wake the waiting models when memory of the host may have become free."""
        while True:
            await self._snapshots.host_budget.change.wait()
            self._wake_waiting()

    async def _wait(self, name: str, waiters: list[asyncio.Future[None]]) -> None:
        if self._has_stopped:
            raise Unavailable("the daemon is stopping")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        self._fleet.wake(name)
        try:
            await waiter
        finally:
            if waiter in waiters:
                waiters.remove(waiter)

    async def _run(self) -> None:
        while True:
            woken, new = await self._fleet.woken(), frozenset(self._new)
            try:
                self._decide(await self._registry.list(), woken)
                for number in new:
                    self._note_loaded(number)
                await self._mounts.publish()
            except Exception:
                _logger.exception("no steps are begun now")

    def _decide(self, rows: Sequence[ModelRow], woken: set[str]) -> None:
        """Begin the due steps of the models ``woken``, in the order of the start."""
        self._counted = None
        now_s, known = time.monotonic(), {str(row.spec.name): row for row in rows}
        for name in woken - known.keys():
            self._forget(name)
        last = len(self._order)

        def rank(name: str) -> tuple[bool, int]:
            lane = self._lanes[name]
            return not (lane.added or lane.warm or lane.settled), self._order.get(name, last)

        for name in sorted(known.keys() & woken, key=rank):
            try:
                self._decide_on(known[name], now_s)
            except Exception:
                _logger.exception("no steps of %s are begun now", name)
        self._answer_claims(woken)

    def _decide_on(self, row: ModelRow, now_s: float) -> None:
        name = row.spec.name
        lane = self._lanes[name]
        row = lane.wished(row)
        hosts, devices = self._fleet.hosts, self._fleet.availability(name).devices
        if all(hosts.of(name, device).options == row.spec.engine for device in devices):
            _resolve(lane.replaced)  # before the state: the user holds the model again
        state = self._state(row, lane, now_s)
        if state.is_shut_out and not state.is_trial:
            self.abandon(name, self._fleet.breakers.reason(name) or "")
        limit_s = self._settings.limits.load_timeout_s
        decision = next_steps(state, self._plan(row, state, now_s), limit_s, now_s)
        for step in decision.steps:
            self._begin(row, lane, step)
        lane.blocked = decision.blocked
        self._note_wait(name, lane, decision, now_s)
        self._answer(name, lane, decision)

    def _note_wait(self, name: str, lane: _Lane, decision: Decision, now_s: float) -> None:
        is_trying = any(step.kind in (StepKind.LOAD, StepKind.BRING) for step in lane.steps)
        if decision.wait is None and not is_trying:
            lane.waits_since_s = None
        elif decision.wait is not None and lane.waits_since_s is None:
            lane.waits_since_s = now_s
        is_claimant = any(claim.claimant == name for claim in self._room.claims.values())
        cause = Cause.PLACE if is_claimant else "" if decision.wait is None else decision.wait.cause
        self._fleet.set_wait(name, cause)

    def _answer(self, name: str, lane: _Lane, decision: Decision) -> None:
        """Let requests and clients go on that need wait no longer."""
        is_open, now = self._fleet.is_open(name), self._fleet.availability(name)
        if is_open and ModelStep(StepKind.OPEN) not in lane.steps:
            _resolve(lane.added)
        if self._fleet.is_warm(name):
            self._dispatcher.go_on(name)
            is_bringing = any(step.kind is StepKind.BRING for step in lane.steps)
            if is_open and now.phase is ModelPhase.READY and not is_bringing:
                _resolve(lane.warm)
        if not (lane.steps or decision.steps or decision.blocked or self._fleet.is_held(name)):
            _resolve(lane.settled)

    def _state(self, row: ModelRow, lane: _Lane, now_s: float) -> ModelView:
        name, live = row.spec.name, self._dispatcher.live
        now, breakers = self._fleet.availability(name), self._fleet.breakers
        workers = self._supervisor.workers
        hosts = {worker.number: self._host(row, lane, worker) for worker in workers}
        size = max(row.weight_bytes, lane.expected_bytes)
        return ModelView(
            phase=now.phase,
            hosts=hosts,
            weights={
                degree: self._snapshots.weights(name, degree, size)
                for degree in {host.degree for host in hosts.values() if host.degree}
            },
            devices=now.devices,
            is_open=self._fleet.is_open(name),
            is_evicted=now.is_evicted,
            is_damaged=self._fleet.is_damaged(name),
            is_loaded=self._fleet.loaded(name) is not None,
            is_recorded=row.state is now.state and row.error == now.reason,
            is_shut_out=breakers.is_shut_out(name),
            is_failed=now.retry_at_s is not None,
            is_trial=breakers.is_half_open(name),
            is_held=self._fleet.is_held(name) and not (lane.is_added or lane.replaced),
            is_added=lane.is_added,
            is_wished=bool(lane.warm),
            is_removed=bool(lane.removed),
            num_waiting=live.num_waiting(name),
            num_live=live.num_of(name),
            under_way=frozenset(lane.steps),
            retry_at_s={key: at_s for key, (_, at_s) in lane.waits.items()},
            waits_since_s=lane.waits_since_s,
        )

    def _host(self, row: ModelRow, lane: _Lane, worker: Worker) -> HostState:
        snapshots, number = self._fleet.snapshots, worker.number
        is_new, has_client = number in self._new, bool(lane.added or lane.warm or lane.settled)
        can_load = worker.has_loaded or is_new or has_client
        host = self._fleet.hosts.of(row.spec.name, number)
        return HostState(
            phase=host.phase,
            degree=snapshots.degree(number) if snapshots.needing([number]) else 0,
            is_idle=worker.is_ready and not worker.num_loads and can_load,
            is_new=is_new or bool(lane.settled),
            is_resting=number in snapshots.resting(row.spec.name),
            is_outdated=host.options != row.spec.engine,
        )

    def _plan(self, row: ModelRow, state: ModelView, now_s: float) -> HostingPlan:
        absent = [host for host in state.hosts.values() if host.phase is HostPhase.ABSENT]
        model = self._room.model(row, now_s)
        if state.is_wished or state.is_added:
            model = replace(model, is_wanted=True)
        size = 0 if state.devices else max(row.weight_bytes, self._lanes[model.name].expected_bytes)
        devices = self._devices(size) if absent else ()
        claimed = [claim for claim in self._room.claims if self._room.may_leave(model.name, claim)]
        return desired(model, state.devices, devices, self._starting(), claimed)

    def _answer_claims(self, woken: Collection[str]) -> None:
        """Let loads go on whose claims were decided: the engine has left, or does not leave."""
        for number, claim in self._room.claims.items():
            step = ModelStep(StepKind.EVICT, number, is_alone=True)
            if claim.holder in woken and step not in self._lanes[claim.holder].steps:
                claim.answered.set()

    def _devices(self, weight_bytes: int) -> Sequence[HostingDevice]:
        """Return the devices that can load, counted once for all models until a load begins."""
        if self._counted is None:
            self._counted = self._room.devices()
        return self._room.large_enough(self._counted, weight_bytes)

    def _begin(self, row: ModelRow, lane: _Lane, step: ModelStep) -> None:
        name = row.spec.name
        worker = self._supervisor.workers[step.number] if step.kind is StepKind.LOAD else None
        if worker is not None:
            worker.num_loads += 1
            self._counted = None
        task = asyncio.create_task(self._carry_out(row, lane, step), name=f"{step.key} {name}")
        lane.steps[step] = task
        self._fleet.began(name, task)

        def ended(task: asyncio.Task[None]) -> None:
            if worker is not None:
                worker.num_loads -= 1
            del lane.steps[step]
            if not task.cancelled() and (error := task.exception()) is not None:
                lane.postpone(step, time.monotonic(), is_short=False)
                _logger.error("%s of %s failed", step.key, name, exc_info=error)
                self._dispatcher.fail_waiting(name, f"{name} could not be warmed")
                self._raise(lane, Failed(f"{name}: internal error"))
            others = [name for name, other in self._lanes.items() if other.blocked]
            self._fleet.wake(name, *others)

        task.add_done_callback(ended)

    async def _carry_out(self, row: ModelRow, lane: _Lane, step: ModelStep) -> None:
        name = row.spec.name
        now = await self._registry.get(name)  # a change may have ended after the list was read
        if now is None:
            return
        now = lane.wished(now)
        try:
            if step.kind is StepKind.FAIL:
                raise self._end_of_wait(now, lane, step)
            if step.kind is StepKind.WITHDRAW:
                await self._failures.record(name, self._fleet.breakers.reason(name) or "")
            if step.kind is StepKind.OPEN and lane.is_added:
                self._dispatcher.check_servable()
            size = max(now.weight_bytes, lane.expected_bytes)
            await self._performer.perform(now, step, size)
        except GpupoolError as error:
            await self._failed(now, lane, step, error)
        else:
            lane.waits.pop(step.key, None)
            if step.kind is StepKind.LOAD:
                lane.waits.pop(ModelStep(StepKind.OPEN).key, None)
            elif step.kind is StepKind.RENEW:
                self._fleet.set_damaged(name, is_damaged=False)
            elif step.kind is StepKind.REMOVE:
                _resolve(lane.removed)
        if self._fleet.is_warm(name):
            self._dispatcher.go_on(name)

    async def _failed(
        self, row: ModelRow, lane: _Lane, step: ModelStep, error: GpupoolError
    ) -> None:
        """Record a failed step as its verdict says."""
        name, now_s = row.spec.name, time.monotonic()
        state = self._state(row, lane, now_s)
        is_full = isinstance(error, CacheFull | EnginesFull)
        is_short = is_full and not state.devices
        is_short |= step.kind in (StepKind.BRING, StepKind.LEAVE) and isinstance(error, Refused)
        if not isinstance(error, WorkerEnded):
            lane.postpone(step, now_s, is_short=is_short)
        says, divisions = verdict(state, step, error), self._room.divisions
        is_undivided = step.kind is StepKind.LOAD and isinstance(error, Refused) and not is_full
        is_undivided = is_undivided and await divisions.note(row.spec, step.number, error.message)
        if is_undivided and not state.devices:
            says = FailureVerdict.LATER
        _logger.info("%s of %s: %s (%s)", step.key, name, error, says.name.lower())
        match says:
            case FailureVerdict.LATER:
                return lane.note(error)
            case FailureVerdict.NOTED:
                await self._note(name, error)
                if step.kind is not StepKind.OPEN:  # another load may serve a client
                    return lane.note(error)
            case FailureVerdict.POSTPONED:
                self._fleet.breakers.postpone(name, now_s)
            case FailureVerdict.FAILED_AGAIN:
                await self._failures.failed_again(name, error, now_s)
            case FailureVerdict.NOT_WARMED:
                await self._not_warmed(name, error)
            case FailureVerdict.NOT_LOADED:
                await self._failures.not_loaded(name, error)
        self._raise(lane, error, step)

    async def _note(self, name: str, error: GpupoolError) -> None:
        if self._fleet.availability(name).devices:
            await self._failures.not_loaded(name, error)
        else:  # another device is loading
            self._history.record_event("error", "model_failed", name, str(error))

    async def _not_warmed(self, name: str, error: GpupoolError) -> None:
        self._history.record_event("error", "warm_failed", name, str(error))
        self._dispatcher.fail_waiting(name, f"{name} could not be warmed: {error}")
        now = self._fleet.availability(name)
        is_full = isinstance(error, (EnginesFull, TimedOut, Unavailable))
        if not now.devices and not (now.is_evicted and is_full):
            await self._failures.not_loaded(name, error)

    def _end_of_wait(self, row: ModelRow, lane: _Lane, step: ModelStep) -> GpupoolError:
        """Return why a model has waited in vain."""
        if step.cause is Cause.MEMORY:
            size = max(row.weight_bytes, lane.expected_bytes)
            waited_s = 0.0 if lane.is_added else self._settings.limits.load_timeout_s
            return self._snapshots.why_full(row.spec.name, step.number, size, waited_s)
        try:
            return self._room.why_none(row)
        except Refused as error:
            return error

    def _raise(self, lane: _Lane, error: GpupoolError, step: ModelStep | None = None) -> None:
        """Tell the clients that wait of a failure, perhaps of a step."""
        lane.note(error)
        own = {StepKind.REPLACE: (lane.replaced,), StepKind.REMOVE: (lane.removed,)}
        for waiters in lane.clients if step is None else own.get(step.kind, lane.clients):
            _resolve(waiters, error)

    def _note_loaded(self, number: int) -> None:
        """Record that a new worker has loaded the models of its start, if no load is due."""
        worker = self._supervisor.workers[number]
        is_due = worker.num_loads or any(number in lane.blocked for lane in self._lanes.values())
        if worker.is_ready and not is_due:
            worker.has_loaded = True
            self._keep(self._snapshots.tidy())
        if worker.has_loaded or not worker.is_ready:
            self._new.discard(number)

    def _starting(self) -> list[int]:
        """Return the workers that start for the first time."""
        return [worker.number for worker in self._supervisor.up if worker.state == "starting"]

    def _forget(self, name: str) -> None:
        lane = self._lanes.get(name)
        if lane is not None and not self._fleet.knows(name):
            self._raise(lane, NoSuchModel(f"no model is named {name!r}"))
            _resolve(lane.settled)
            if lane.is_idle:
                del self._lanes[name]

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _resolve(waiters: list[asyncio.Future[None]], error: GpupoolError | None = None) -> None:
    for waiter in (waiter for waiter in waiters if not waiter.done()):
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
    waiters.clear()
