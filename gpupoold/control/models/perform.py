"""The steps of models, carried out on workers, frontends and snapshots, and their failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import datetime

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import load_text
from gpupoold.control.models.descriptions import (
    is_profiled,
    latency_model_of,
    profile_rows,
    profiles_of_sibling,
    to_load,
)
from gpupoold.control.models.devices import EngineRoom
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.models.steps import ModelStep, StepKind
from gpupoold.control.processes.supervised import Candidates, Death, candidates_of
from gpupoold.control.weights.cache import CachedSnapshot
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.domain import ModelSpec, ModelState
from gpupoold.errors import GpupoolError, Refused, TimedOut
from gpupoold.latency.shape import LatencyError
from gpupoold.memory.host import owners_of
from gpupoold.memory.prefix_files import remove_files
from gpupoold.scheduling.events import ModelCosts, costs_of
from gpupoold.scheduling.hosting import HostingReason
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)
_POLL_S = 0.1
# The longest time for profiling a model; the device serves no other model meanwhile. On emulated
# devices, which are for trials with small models, additions must be quick. A simulated device
# reports its latency model at once.
_PROFILING_BUDGET_S = {"cuda": 3.0, "emulated": 1.0, "sim": 1.0}
# The longest wait for the end of migrations from a device that a model leaves.
_MIGRATIONS_S = 10.0

_UNKNOWN = Death("an earlier crash without a clear cause", is_at_fault=True)


class Performer(ModelPart):
    """Carries out one step at a time for each device of a model, and unloads models.

    A loaded model accepts requests on the device.
    """

    def __init__(
        self, parts: ControlParts, snapshots: ModelSnapshots, mounts: ModelMounts, room: EngineRoom
    ) -> None:
        super().__init__(parts)
        self._snapshots = snapshots
        self._mounts = mounts
        self._room = room
        self._cleaning: set[asyncio.Task[None]] = set()

    async def perform(self, row: ModelRow, step: ModelStep, expected_bytes: int) -> None:
        """Carry out a step; an engine's snapshot has about ``expected_bytes``.

        Raises GpupoolError: the reason of the failure.
        """
        match step.kind:
            case StepKind.LOAD:
                await self._load(row, step, expected_bytes)
            case StepKind.OPEN:
                await self._mounts.open(row.spec.name)
            case StepKind.BRING:
                await self._warm(row, lambda: self._bring(row, step.number))
            case StepKind.REPLACE:
                await self._replace(row, self._supervisor.workers[step.number], step.reason)
            case StepKind.RENEW:
                await self._warm(row, lambda: self._renew(row))
            case StepKind.LEAVE:
                await self._leave(row.spec.name, self._supervisor.workers[step.number])
            case StepKind.EVICT:
                await self._evict(row.spec.name, self._supervisor.workers[step.number])
            case StepKind.WITHDRAW:
                await self._take_off(row.spec.name)
                self._snapshots.drop(row.spec.name)
            case StepKind.REST:
                self._rest(row, step.number)
            case StepKind.REMOVE:
                await self._remove(row.spec.name)

    async def _remove(self, name: str) -> None:
        """Unload and forget a model; a worker that does not answer has the model no longer."""
        self._dispatcher.fail_model(name, f"{name} was removed")
        self._dispatcher.forget(name)
        try:
            await self._take_off(name)
        finally:
            self._supervisor.forget_prefixes(name)
            if self._settings.memory.kv_files_bytes:
                await asyncio.to_thread(remove_files, self._settings.kv_folder, owners_of(name))
            await self._snapshots.forget(name)
            await self._registry.remove(name)
            self._fleet.remove(name)

    async def _load(self, row: ModelRow, step: ModelStep, expected_bytes: int) -> None:
        """Load on one worker, unless the worker has the model.

        A new snapshot takes about ``expected_bytes``, for which other snapshots are evicted.

        Raises:
            CacheFull: too few snapshots can be evicted now.
            EnginesFull: too few engines can be evicted for the step's reason.
            GpupoolError: the worker's reason.
        """
        name, worker = row.spec.name, self._supervisor.workers[step.number]
        was_cached = self._snapshots.has_any(name)
        was_evicted = self._fleet.availability(name).is_evicted
        self._fleet.loading(name)
        with self._snapshots.host_budget.holding(self._fleet.snapshots.of(name, worker.number)):
            if not self._has(worker, row.spec):
                await self._build(row.spec, worker, expected_bytes, step.reason)
        if was_evicted and not was_cached:
            self._dispatcher.accounts.meters.warmed(name, [worker.number])

    def _has(self, worker: Worker, spec: ModelSpec) -> bool:
        return self._fleet.hosts.of(spec.name, worker.number).is_ordered

    async def _build(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int, reason: HostingReason
    ) -> None:
        name = spec.name
        self._fleet.check_quarantine(name)
        row = await self._registry.get(name)
        if row is not None:
            spec = replace(spec, adapters=row.spec.adapters)  # added while the load waited
        snapshot = await self._snapshots.for_load(spec, worker, expected_bytes)
        async with worker.load_lock:
            if self._has(worker, spec):
                return
            await self._room.make(name, worker, reason)
            budget_s = await self._profiling_budget_s(name, worker)
            try:
                loaded, fd = await self._supervisor.load(
                    worker,
                    to_load(spec, self._settings),
                    snapshot,
                    budget_s,
                    self._snapshots.kv_identity(spec, worker),
                )
                with _closing(fd) as kept:
                    self._fleet.hosts.of(name, worker.number).options = spec.engine
                    await self._keep_engine_bytes(name, worker, loaded)
                    self._fleet.check_quarantine(name)  # it may have crashed another worker
                    if not loaded.engine_of:  # an engine taken over is as large as before
                        await self._room.settle(name, worker, reason)
                    if fd is not None:
                        kept.pop_all()  # closed by the cache, also after an error
                        await self._snapshots.keep(fd, worker, loaded, snapshot)
            except BaseException:
                self._clean_up(worker, name)  # the worker may still finish the load
                raise
        self._fleet.hosts.of(name, worker.number).why = reason.why
        await self._serve(spec, worker, loaded)
        size, took = format_bytes(loaded.model.weight_bytes), load_text(loaded.stages)
        text = "%s loaded on worker %d in %s: %s of weights, %s for the engine (%s)"
        engine = format_bytes(loaded.memory.device_bytes)
        _logger.info(text, name, worker.number, took, size, engine, reason.why)

    async def _serve(self, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the facts of an engine, and let the engine serve."""
        await self._keep_facts(spec, worker, loaded)
        costs = await self._costs(spec.name, worker)
        if not self._has(worker, spec):
            raise WorkerEnded(f"worker {worker.number} ended", "see `gpupool logs`")
        targets = self._fleet.targets(spec.name)
        if targets != spec.targets:  # changed since the order
            worker.send(m.SetTargets(spec.name, targets.ttft_s, targets.tbt_s))
        self._dispatcher.host(targets, loaded.model, costs, worker)

    async def _profiling_budget_s(self, name: str, worker: Worker) -> float:
        """Return the time for profiling: models are profiled once per kind of device.

        A fine-tune takes the profile of another fine-tune.
        """
        row, ready = await self._registry.get(name), worker.ready
        if row is None or ready is None or is_profiled(row, ready):
            return 0.0
        others = await self._registry.list()
        if found := await asyncio.to_thread(profiles_of_sibling, row, others, ready):
            await self._registry.set_profiles(name, found)
            return 0.0
        return _PROFILING_BUDGET_S[worker.device.kind]

    async def _keep_facts(self, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the facts of a load and the measured profile, if there is one."""
        for name, problem in loaded.model.adapter_problems.items():
            text = f"adapter {name} was not loaded: {problem}"
            self._history.record_event("error", "adapter_failed", spec.name, text)
        await self._registry.set_loaded(
            spec.name,
            architecture=loaded.model.architecture,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=loaded.model.kv_bytes_per_token,
            max_model_len=loaded.model.max_model_len,
        )
        if loaded.profile is None or worker.ready is None:
            return
        problem = loaded.profile.problem
        try:
            rows = profile_rows(
                loaded.profile, loaded.model, spec.revision, worker.ready, time.time()
            )
            await self._registry.set_profiles(spec.name, rows)
        except GpupoolError as error:  # a model without a profile can serve too
            problem = f"{problem}; {error}" if problem else str(error)
        if problem:
            text = (
                f"{problem}; the model serves, and its steps are timed again with its next engine"
            )
            self._history.record_event("warning", "profile_incomplete", spec.name, text)

    async def _keep_engine_bytes(self, name: str, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the memory of an engine outside the pages, the estimate for later loads.

        The memory of the first engine on a worker is not stored, nor of one taken over, which may
        have been the first: libraries and kernels, which later engines share, are part of that.
        """
        is_first = self._fleet.hosts.first_on(worker.number) == name
        if worker.ready is not None and not (is_first or loaded.engine_of):
            kind, num_bytes = worker.ready.device_name, loaded.memory.device_bytes
            await self._registry.set_engine_bytes(name, kind, num_bytes)

    async def _costs(self, name: str, worker: Worker) -> ModelCosts | None:
        """Return the model's costs for the scheduling core, None while unknown."""
        row = await self._registry.get(name)
        if row is None or worker.ready is None:
            return None
        try:
            latency = latency_model_of(row, worker.ready.device_name)
        except LatencyError as error:
            _logger.warning("%s: the stored latency is unusable: %s", name, error)
            return None
        return costs_of(latency) if latency is not None else None

    def _clean_up(self, worker: Worker, name: str) -> None:
        """Unload a partly loaded model in the background; a later load waits for the end."""
        task = asyncio.create_task(self._unload_quietly(worker, name))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _unload_quietly(self, worker: Worker, name: str) -> None:
        try:
            await self._supervisor.unload(worker, name)
        except GpupoolError as error:
            _logger.error("%s", error)

    async def _reload(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        """Replace the model's engine on a worker, using the snapshot if present.

        The caller holds the model's snapshots. Raises GpupoolError: the worker's reason; the worker
        no longer has the model.
        """
        try:
            await self._supervisor.unload(worker, spec.name)
            await self._build(spec, worker, expected_bytes, HostingReason.NEEDED)
        except BaseException:
            self._dispatcher.unhost(spec.name, worker)
            raise

    async def _replace(self, row: ModelRow, worker: Worker, reason: HostingReason) -> None:
        """Build an engine with the model's options beside the present engine, which serves
        meanwhile.

        Then the worker's requests go on in the new engine, after the tokens that their clients
        have.
        """
        spec, name = row.spec, row.spec.name
        given = self._snapshots.cached(name, worker)
        budget_s = _PROFILING_BUDGET_S[worker.device.kind]
        with self._snapshots.host_budget.holding(*self._fleet.needed_snapshots(name)):
            async with worker.load_lock:
                # Both engines exist for a moment.
                await self._room.make(name, worker, reason, beside_itself=True)
                host = self._fleet.hosts.of(name, worker.number)
                present, host.options = host.options, None
                try:
                    loaded, fd = await self._supervisor.load(
                        worker, to_load(spec, self._settings), given, budget_s
                    )
                except TimedOut:
                    raise  # the worker may still replace the engine
                except GpupoolError:
                    host.options = present
                    raise
            host.options = spec.engine
            if fd is not None:
                await self._snapshots.keep_changed(fd, spec, worker, loaded)
            await self._keep_engine_bytes(name, worker, loaded)
            await self._serve(spec, worker, loaded)

    async def _warm(self, row: ModelRow, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` on the model's snapshots, which stay meanwhile."""
        model, began_s = row.spec.name, time.monotonic()
        was_cached = self._snapshots.has_any(model)
        with self._snapshots.host_budget.holding(*self._fleet.needed_snapshots(model)):
            await work()
        if not was_cached:
            self._dispatcher.accounts.meters.warmed(model, self._fleet.devices_with_snapshot(model))
        _logger.info("%s is warm after %.2f s", model, time.monotonic() - began_s)

    async def _bring(self, row: ModelRow, degree: int) -> None:
        """Attach the snapshot of a degree to all workers with the model.

        Raises CacheFull: there is no memory for the snapshot; the engines stay.
        """
        model, size = row.spec.name, row.weight_bytes
        workers = self._workers_of(model, degree)
        if not workers:
            return  # all have died, and load the model after the restart
        await self._snapshots.reserve(row.spec, workers[0], size)
        snapshot = self._snapshots.cached(model, workers[0])
        snapshot = snapshot or await self._snapshots.read(row.spec, workers[0])
        if snapshot is None:
            worker = min(
                workers, key=lambda worker: len(self._dispatcher.live.on_device(worker.number))
            )
            await self._reload(row.spec, worker, size)
            snapshot = self._snapshots.cached(model, worker)
        if snapshot is not None:
            await self._hand_out(row, snapshot, workers)
        for worker in workers:
            if self._fleet.hosts.of(model, worker.number).has_snapshot:
                self._dispatcher.wake(model, worker)

    async def _renew(self, row: ModelRow) -> None:
        """Make the model's snapshots again and attach the new ones to all workers not at rest.

        The saved snapshots may be damaged too.
        """
        model = row.spec.name
        await self._snapshots.renew(model)
        resting = self._fleet.snapshots.resting(model)
        by_degree: dict[int, list[Worker]] = {}
        for worker in self._workers_of(model):
            if worker.number not in resting:
                by_degree.setdefault(worker.device.num_gpus, []).append(worker)
        for workers in by_degree.values():
            await self._reload(row.spec, workers[0], row.weight_bytes)
            await self._reload_all(row, workers[1:])

    async def _hand_out(
        self, row: ModelRow, snapshot: CachedSnapshot, workers: list[Worker]
    ) -> None:
        """Attach the snapshot to the workers of its degree; rebuild engines of another layout."""
        model, hosts = row.spec.name, self._fleet.hosts
        present = self._workers_of(model)
        lacking = [
            worker
            for worker in workers
            if worker in present and not hosts.of(model, worker.number).has_snapshot
        ]
        fitting = [
            worker
            for worker in lacking
            if hosts.of(model, worker.number).layout_digest == snapshot.digest
        ]
        given = (self._give(worker, model, snapshot) for worker in fitting)
        _raise_first(await asyncio.gather(*given, return_exceptions=True))
        await self._reload_all(row, [worker for worker in lacking if worker not in fitting])

    async def _reload_all(self, row: ModelRow, workers: list[Worker]) -> None:
        """Rebuild engines side by side; raise the first failure after the end of all."""
        reloads = (self._reload(row.spec, worker, row.weight_bytes) for worker in workers)
        _raise_first(await asyncio.gather(*reloads, return_exceptions=True))

    async def _give(self, worker: Worker, model: str, snapshot: CachedSnapshot) -> None:
        try:
            await self._supervisor.give_snapshot(worker, model, snapshot)
        except GpupoolError:
            if worker.is_ready:
                raise
            # A dead worker gets the snapshot with the next load.

    async def _leave(self, name: str, worker: Worker) -> None:
        """Unload a model from a worker; its requests continue on other workers."""
        deadline_s = time.monotonic() + _MIGRATIONS_S
        async with worker.load_lock:
            while True:
                try:
                    requests = self._dispatcher.withdraw(name, worker)
                    break
                except Refused:
                    if time.monotonic() >= deadline_s:
                        raise
                await asyncio.sleep(_POLL_S)
            try:
                await self._supervisor.unload(worker, name)
            finally:
                self._dispatcher.go_elsewhere(requests, worker)

    async def _evict(self, name: str, worker: Worker) -> None:
        """Unload an engine for another model; a request of a model without a device loads.

        Requests that the engine has wait for their turn.
        """
        if not self._room.may_leave(name, worker.number):
            return  # a request has come, or the claim is over
        claim = self._room.claims[worker.number]
        requests = self._dispatcher.withdraw(name, worker, is_evicted=True)
        try:
            await self._supervisor.unload(worker, name, keeps_engine=claim.keeps_engine)
        finally:
            self._dispatcher.go_elsewhere(requests, worker)
        if requests:
            _logger.info("%s waits with %d requests for %s", name, len(requests), claim.claimant)
            return
        what = "was given to" if claim.keeps_engine else "made place for"
        text = f"the engine on device {worker.number} {what} {claim.claimant}"
        self._history.record_event("info", "engine_evicted", name, text)

    def _rest(self, row: ModelRow, degree: int) -> None:
        model = row.spec.name
        why = self._snapshots.why_full(model, degree, row.weight_bytes)
        numbers = [worker.number for worker in self._workers_of(model, degree)]
        self._snapshots.rest(model, numbers, why.message)

    async def _take_off(self, name: str) -> None:
        self._mounts.unmount(name)
        ends = (self._take_from(worker, name) for worker in self._supervisor.workers)
        _raise_first(await asyncio.gather(*ends, return_exceptions=True))

    async def _take_from(self, worker: Worker, name: str) -> None:
        """Unload a model when the memory of its snapshot is unpinned and free."""
        try:
            await self._supervisor.drop_snapshot(worker, name)
        finally:
            await self._supervisor.unload(worker, name)

    def _workers_of(self, model: str, degree: int = 0) -> list[Worker]:
        """Return the workers that need the model's snapshot, of one degree or of all."""
        workers = [
            self._supervisor.workers[number] for number in self._fleet.devices_with_snapshot(model)
        ]
        return [worker for worker in workers if degree in (0, worker.device.num_gpus)]


def _raise_first(errors: list[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


@contextlib.contextmanager
def _closing(fd: int | None) -> Iterator[contextlib.ExitStack]:
    """Close ``fd`` at the end of the context, unless the stack has been emptied."""
    with contextlib.ExitStack() as stack:
        if fd is not None:
            stack.callback(os.close, fd)
        yield stack


class Failures(ModelPart):
    """Records failures of models and crashes of workers, and the times of the next tries.

    Crashes of workers are attributed to models here. A model with an open circuit breaker is in
    quarantine: the controller takes the model off the workers.
    """

    def __init__(self, parts: ControlParts) -> None:
        super().__init__(parts)
        self._unclear: dict[str, tuple[int, Death]] = {}  # the latest crash of each model

    async def not_loaded(self, model: str, error: GpupoolError) -> None:
        """Record that a worker could not load a model; without another worker the model has
        failed.
        """
        if not self._fleet.knows(model):
            return  # removed meanwhile
        self._history.record_event("error", "model_failed", model, str(error))
        if self._fleet.availability(model).devices:
            return
        self._dispatcher.fail_model(model, f"{model} could not be loaded: {error}")
        if self._fleet.breakers.retry_at_s(model) is None:
            self._fleet.breakers.open(model, str(error), time.monotonic(), is_blocking=False)
        await self.record(model, str(error))

    async def failed_again(self, model: str, error: GpupoolError, began_s: float) -> None:
        """Record that a retry, which began at ``began_s``, has failed: the next wait is longer."""
        self._fleet.breakers.open(model, str(error), began_s, is_blocking=False)
        self._history.record_event("error", "model_failed", model, str(error))
        await self.record(model, str(error))

    async def record(self, model: str, reason: str) -> None:
        """Record that a model cannot serve, with the reason."""
        text = self._with_time(model, reason)
        self._fleet.fail(model, text)
        if await self._registry.get(model) is not None:
            await self._registry.set_state(model, ModelState.FAILED, text)

    def crashed(self, device: int, death: Death) -> Candidates:
        """Record the death and the activity of a worker; return the possible causes."""
        lost = self._dispatcher.live.on_device(device)
        candidates = candidates_of(death, {request.request_id: request.model for request in lost})
        text = f"ended ({death.reason}) and is restarted"
        if death.doing:
            text += f"; activity: {death.doing}"
        self._history.record_event("error", "worker_down", str(device), text)
        if candidates.only_model is not None:
            self._record_crash(candidates.only_model, device, death)
        else:
            self._unclear |= dict.fromkeys(candidates.models, (device, death))
        return candidates

    def worker_down(self, worker: Worker, death: Death) -> None:
        """Attribute the end of a worker, and requeue the requests there.

        A device whose hardware failed is drained if another device is in service.
        """
        candidates = self.crashed(worker.number, death)
        is_draining = self._fleet.is_device_draining
        others = [
            other for other in self._supervisor.workers if other.is_ready and other is not worker
        ]
        has_place = not all(is_draining(other.number) for other in others)
        if death.is_of_device and has_place and not is_draining(worker.number):
            self._dispatcher.set_draining(worker.number, is_draining=True)
        reason = f"the worker of device {worker.number} ended: {death.reason}"
        self._dispatcher.worker_down(worker, reason, candidates)
        if death.is_at_fault and not worker.has_come_up:  # the worker may never become ready
            self._dispatcher.fail_unhosted(f"{reason}, before the worker was ready")

    def convicted(self, model: str, request_id: str) -> None:
        reason = self._fleet.breakers.record_convicted(model, request_id, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def acquitted(self, model: str) -> None:
        self._record_crash(model, *self._unclear.pop(model, (0, _UNKNOWN)))

    def _record_crash(self, model: str, device: int, death: Death) -> None:
        reason = self._fleet.breakers.record_crash(model, device, death, time.monotonic())
        if reason is not None:
            self._shut_out(model, reason)

    def _shut_out(self, model: str, reason: str) -> None:
        """End the model's requests; the controller takes the model off all workers."""
        text = self._with_time(model, reason)
        self._history.record_event("error", "model_quarantined", model, text)
        self._dispatcher.accounts.meters.models[model].quarantines += 1
        self._dispatcher.fail_model(model, f"{model} is in quarantine, because the model {reason}")
        self._fleet.fail(model, text)
        self._dispatcher.forget(model)

    def _with_time(self, model: str, reason: str) -> str:
        """Return the reason together with the time of the next try."""
        retry_at_s = self._fleet.breakers.retry_at_s(model)
        if retry_at_s is None:
            return reason
        at = datetime.fromtimestamp(time.time() + retry_at_s - time.monotonic()).astimezone()
        return f"{reason}; next try at {at:%H:%M:%S}"
