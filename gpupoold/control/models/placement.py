"""Engines on devices, as the scheduling core chooses: loads side by side, and moves by hand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.fleet.transitions import ModelPhase
from gpupoold.control.models.engine_room import EngineRoom, EnginesFull
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import find_model
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.host_budget import CacheFull
from gpupoold.control.workers.worker import Worker, WorkerEnded, WorkerIsDown
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError, Refused, TimedOut, Unavailable, no_such_device
from gpupoold.scheduling.hosting import (
    HostingChoice,
    HostingDevice,
    HostingReason,
    choose,
    hostable_change,
)

_logger = logging.getLogger(__name__)

# A worker that starts for the first time delays the end of an addition at most for this time.
_STARTING_S = 30.0
_POLL_S = 0.1
# Waits after failed loads on a device: the first wait, doubled with each failure.
_FIRST_WAIT_S = 10.0
_MAX_WAIT_S = 600.0
_MIGRATIONS_S = 10.0
# The policy plans homes as often.
_HOSTABLE_PERIOD_S = 5.0


class EnginePlacement:
    """Loads engines where the scheduling core wants them; ``clock`` returns monotonic seconds."""

    def __init__(
        self,
        registry: Registry,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        loader: ModelLoader,
        room: EngineRoom,
        mounts: ModelMounts,
        failures: Failures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._loader = loader
        self._room = room
        self._mounts = mounts
        self._failures = failures
        self._clock = clock
        self._waits: dict[tuple[str, int], tuple[float, float]] = {}  # wait, next try
        self._tasks: set[asyncio.Task[None]] = set()
        self._balancing: asyncio.Task[None] | None = None
        self._next_hostable_s = -math.inf

    async def load_first(
        self, spec: ModelSpec, expected_bytes: int = 0, wait_s: float = 0.0
    ) -> None:
        """Load a model on the best device in service.

        The caller opens the model. The load waits up to ``wait_s`` for memory of busy engines, and
        for a worker that starts for the first time if no other may host the model.

        Raises:
            EnginesFull: no device has memory for the engine.
            Refused: no device can divide the model.
            Unavailable: no device that may host the model is in service.
            GpupoolError: the reason of a worker.
        """
        began_s, full = self._clock(), set[int]()
        while True:
            choice = await self._wait_for_choice(spec.name, expected_bytes, began_s + wait_s, full)
            if choice is None:
                return None
            try:
                return await self._loader.load(
                    spec, self._worker(choice), expected_bytes, choice.reason
                )
            except WorkerIsDown as error:  # another device can load
                _logger.info("%s: %s", spec.name, error)
            except EnginesFull as error:  # larger than expected
                full.add(choice.device)
                _logger.info("%s", error)
            except Refused as error:
                if isinstance(error, CacheFull):
                    raise
                if not await self._is_elsewhere(spec, choice, error):
                    raise
                _logger.info("%s", error)

    async def _wait_for_choice(
        self, name: str, weight_bytes: int, deadline_s: float, full: set[int]
    ) -> HostingChoice | None:
        """Wait for a device that can load a model, or for a worker that starts.

        None if a device has loaded the model meanwhile: a worker that has started, with all its
        models, or a device that was due to load the model.

        Raises:
            EnginesFull, Refused, Unavailable: no device can load the model by the deadline.
        """
        started = False
        while True:
            row = await find_model(self._registry, name)
            if self._fleet.availability(name).devices:
                return None
            try:
                return self._first_choice(row, weight_bytes, full)
            except (EnginesFull, Unavailable) as error:
                if not started and isinstance(error, Unavailable) and self._may_start(row):
                    started, deadline_s = True, max(deadline_s, self._clock() + _STARTING_S)
                if self._clock() >= deadline_s:
                    raise
            full.clear()
            await asyncio.sleep(_POLL_S)

    def first_worker(self, row: ModelRow) -> Worker | None:
        """Return the worker on which ``load_first`` would load now, None without a choice."""
        try:
            return self._worker(self._first_choice(row, row.weight_bytes, set()))
        except GpupoolError:
            return None

    async def load_on(self, name: str, worker: Worker, reason: HostingReason | None = None) -> None:
        """Load a registered model on a worker, and open the model; no effect on a model that is
        being removed, or that the worker should not host.

        Raises:
            CacheFull: host memory is full now.
            EnginesFull: too few engines can be evicted.
            GpupoolError: the worker's reason.
        """
        async with self._fleet.changing(name).shared():
            row = await self._registry.get(name)
            if row is None or self._fleet.is_draining(name):
                return
            reason = reason or self._reason_for(row, worker)
            if reason is None:
                return
            was_open, num_opened = self._fleet.is_open(name), self._mounts.num_opened
            self._fleet.loading(name)
            await self._loader.load(row.spec, worker, row.weight_bytes, reason)
            if not was_open:
                await self._mounts.open_once(row.spec, num_opened)

    async def spread(self, name: str) -> None:
        """Load a served model side by side on all further devices that should host the model.

        Failures are events, and are retried.
        """
        await self._wait_for_starts()
        row = await self._registry.get(name)
        if row is not None:
            chosen = choose(self._room.model(row), self._room.devices())
            await asyncio.gather(*(self._try(name, choice) for choice in chosen))

    def spread_later(self, name: str) -> asyncio.Task[None]:
        """As :meth:`spread`, in the background."""
        return self._keep(self.spread(name))

    def check(self, now_s: float) -> None:
        """Load and move engines that are not where they should be; to be called every second."""
        if self._balancing is None or self._balancing.done():
            self._balancing = self._keep(self._balance(now_s))

    async def place(self, name: str, devices: Sequence[int]) -> ModelRow:
        """Choose the devices of a model by hand, or give the choice back with no devices.

        Requests on other devices continue on the chosen devices.

        Raises:
            NoSuchModel: the model is not registered.
            UsageError: there is no such device.
            Refused: a chosen device cannot divide the model; nothing has changed.
            GpupoolError: no chosen device could load the model, or a device could not; the choice
                holds, and the load is retried.
        """
        self.check_devices(devices)
        model = (await find_model(self._registry, name)).spec.name
        async with self._fleet.changing(model).alone():
            now = await find_model(self._registry, model)
            chosen = sorted(set(devices))
            self._room.divisions.require_one(replace(now.spec, devices=tuple(chosen)))
            row = await self._registry.set_devices(model, chosen)
            self._fleet.changed(row.spec)
        where = ", ".join(map(str, row.spec.devices))
        text = f"on devices {where}, by hand" if devices else "as the scheduler chooses"
        self._history.record_event("info", "model_placed", model, text)
        if not devices:
            self.spread_later(model)
            return row
        await self._load_chosen(row)
        return await find_model(self._registry, model)

    def check_devices(self, devices: Iterable[int]) -> None:
        """Raise UsageError if a device does not exist."""
        num = len(self._supervisor.workers)
        for number in devices:
            if not 0 <= number < num:
                raise no_such_device(number, num)

    async def stop(self) -> None:
        """Abandon work in progress; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _load_chosen(self, row: ModelRow) -> None:
        """Load a model on the devices chosen by hand that are in service; unload all others.

        Raises:
            GpupoolError: the reason of a device.
        """
        name = row.spec.name
        chosen = choose(self._room.model(row), self._room.devices())
        loads = [self.load_on(name, self._worker(one), one.reason) for one in chosen]
        errors = await asyncio.gather(*loads, return_exceptions=True)
        await self._leave_others(row)
        for error in errors:
            if error is not None:
                raise error
        hosts = self._fleet.availability(name).devices
        in_service = [one.number for one in self._supervisor.workers if one.is_ready]
        if any(one in in_service and one not in hosts for one in row.spec.devices):
            raise self._room.refusal(row)

    def _first_choice(self, row: ModelRow, weight_bytes: int, full: set[int]) -> HostingChoice:
        """Return the best device for the first engine, which is not ``full``.

        Raises:
            EnginesFull, Refused, Unavailable: no device can load the model.
        """
        model = self._room.model(row)
        devices = [one for one in self._room.devices(weight_bytes) if model.allows(one.number)]
        others = [one for one in devices if one.number not in full]
        chosen = choose(replace(model, is_wanted=True), others)
        if chosen:
            return chosen[0]
        if devices:
            raise self._room.refusal(row)
        self._room.divisions.require_one(row.spec)
        where = f" (only {', '.join(map(str, row.spec.devices))} may)" if row.spec.devices else ""
        raise Unavailable(
            f"no device in service can load {row.spec.name}{where}",
            "see `gpupool ps` and `gpupool logs`",
        )

    def _reason_for(self, row: ModelRow, worker: Worker) -> HostingReason | None:
        chosen = choose(self._room.model(row), self._room.devices())
        return next((one.reason for one in chosen if one.device == worker.number), None)

    def _worker(self, choice: HostingChoice) -> Worker:
        return self._supervisor.workers[choice.device]

    async def _try(self, name: str, choice: HostingChoice) -> None:
        """Load on a further device; a failure delays the next try."""
        key = name, choice.device
        try:
            await self.load_on(name, self._worker(choice), choice.reason)
        except WorkerEnded as error:
            _logger.info("%s: %s; loaded when the worker is back", name, error)
        except (CacheFull, EnginesFull, TimedOut) as error:
            self._postpone(key)
            _logger.info("%s", error)
        except GpupoolError as error:
            self._postpone(key)
            row = await self._registry.get(name)
            if row is not None and isinstance(error, Refused):
                await self._is_elsewhere(row.spec, choice, error)
            await self._failures.not_loaded(name, error)
        else:
            self._waits.pop(key, None)

    async def _is_elsewhere(self, spec: ModelSpec, choice: HostingChoice, error: Refused) -> bool:
        """Record the refusal of a group; return whether another device may host the model."""
        return await self._room.divisions.note(spec, choice.device, error.message)

    def _postpone(self, key: tuple[str, int]) -> None:
        last_s, _ = self._waits.get(key, (0.0, 0.0))
        wait_s = min(max(_FIRST_WAIT_S, 2 * last_s), _MAX_WAIT_S)
        self._waits[key] = wait_s, self._clock() + wait_s

    async def _balance(self, now_s: float) -> None:
        """Start the due loads, one for each device without a load, and move misplaced engines."""
        rows = [row for row in await self._registry.list() if self._is_settled(row)]
        for row in rows:
            await self._leave_others(row)
        idle = {
            one.number
            for one in self._supervisor.workers
            if one.is_ready and one.has_loaded and not one.num_loads
        }
        engines, devices = self._fleet.hosts.engines(), self._room.devices()
        if now_s >= self._next_hostable_s:
            self._next_hostable_s = now_s + _HOSTABLE_PERIOD_S
            for row in rows:
                state, model = self._dispatcher.state, self._room.model(row)
                change = hostable_change(state, model, devices)
                if change is not None:
                    self._dispatcher.shell.handle(change)
        for row in rows:
            if idle.difference(engines.get(row.spec.name, ())):
                self._start_due(row, devices, idle, now_s)

    def _start_due(
        self, row: ModelRow, devices: list[HostingDevice], idle: set[int], now_s: float
    ) -> None:
        """Start the due loads of a model on idle devices, which are then no longer idle."""
        name = row.spec.name
        for choice in choose(self._room.model(row, now_s), devices):
            _, next_s = self._waits.get((name, choice.device), (0.0, 0.0))
            if choice.device in idle and now_s >= next_s:
                idle.discard(choice.device)
                self._keep(self._try(name, choice))

    def _is_settled(self, row: ModelRow) -> bool:
        """Return whether no other part is about to load, unload or retry the model."""
        name = row.spec.name
        now = self._fleet.availability(name)
        is_served = now.phase in (ModelPhase.READY, ModelPhase.LOADING)
        return is_served and now.retry_at_s is None and self._fleet.lock(name).is_free

    async def _leave_others(self, row: ModelRow) -> None:
        """Unload a model from devices not chosen by hand, when a chosen device has the model."""
        name, fixed = row.spec.name, row.spec.devices
        hosts = self._fleet.availability(name).devices
        if not any(number in fixed for number in hosts):
            return
        for number in hosts:
            if number not in fixed:
                try:
                    await self._leave(name, self._supervisor.workers[number])
                except GpupoolError as error:
                    _logger.warning("%s stays on device %d for now: %s", name, number, error)

    async def _leave(self, name: str, worker: Worker) -> None:
        """Unload a model from a worker; its requests continue on other workers."""
        deadline_s = self._clock() + _MIGRATIONS_S
        async with self._fleet.lock(name).alone(), worker.load_lock:
            while True:
                try:
                    requests = self._dispatcher.withdraw(name, worker)
                    break
                except Refused:
                    if self._clock() >= deadline_s:
                        raise
                await asyncio.sleep(_POLL_S)
            try:
                await self._supervisor.unload(worker, name)
            finally:
                self._dispatcher.go_elsewhere(requests, worker)

    def _starting(self) -> list[Worker]:
        """Return the workers that start for the first time."""
        return [one for one in self._supervisor.up if one.state == "starting"]

    def _may_start(self, row: ModelRow) -> bool:
        """Return whether a worker that may host the model starts for the first time."""
        model = self._room.model(row)
        return any(model.allows(one.number) for one in self._starting())

    async def _wait_for_starts(self) -> None:
        """Wait for workers that start for the first time."""
        waits = (self._supervisor.wait_ready(one) for one in self._starting())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STARTING_S):
                await asyncio.gather(*waits, return_exceptions=True)

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
