"""The workers: one supervised process per device, restarted after each end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import TypeVar

from gpupoold.config.schema import Settings
from gpupoold.control.fleet.states import HostEvent, HostPhase, Hosts
from gpupoold.control.processes.child import ForkServer, Pending, Starter, execute
from gpupoold.control.processes.supervised import REAL_TIME, OomKills, ProcessHandlers, Timing
from gpupoold.control.weights.cache import CachedSnapshot
from gpupoold.control.workers.worker import Load, Worker, WorkerIsDown, WorkerProcess
from gpupoold.errors import Failed, TimedOut, Unavailable, no_such_device
from gpupoold.system.nvml import GpuReadings
from gpupoold.wire import messages as m

_READY_TIMEOUT_S = 120.0
# For a worker that is down: a broken device must delay no addition.
_RESTART_TIMEOUT_S = 10.0
_READY_POLL_S = 0.05

K = TypeVar("K")
V = TypeVar("V")


class WorkerSupervisor:
    """Starts, watches and restarts the workers."""

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        hosts: Hosts,
        execute: Starter = execute,
        timing: Timing = REAL_TIME,
    ) -> None:
        """``forks`` starts the processes of emulated devices, ``execute`` all others.

        ``hosts`` has the phases of the models on the workers. A GPU's process is a
        program of its own, because the choice of the GPU must precede any use of CUDA.
        """
        self._settings = settings
        self._forks = forks
        self._hosts = hosts
        self._execute = execute
        self._timing = timing
        self.workers = [Worker(i, device) for i, device in enumerate(settings.devices)]
        self.processes: list[WorkerProcess] = []
        self.oom_kills = OomKills(timing.clock())
        self.gpu_readings = GpuReadings(settings.devices)

    @property
    def any_in_service(self) -> bool:
        """True if some worker is ready, or parked until a request comes."""
        return any(worker.is_ready or worker.state == "parked" for worker in self.workers)

    @property
    def any_ready(self) -> bool:
        """True if some worker can load and serve."""
        return any(worker.is_ready for worker in self.workers)

    def start(self, handlers: ProcessHandlers[Worker, m.FromWorker]) -> None:
        """Start every worker; ``handlers.on_up`` is called for each ready worker."""
        self.gpu_readings.start()
        for worker in self.workers:
            is_forked = worker.device.kind == "emulated"
            starter = self._forks.fork if is_forked else self._execute
            process = WorkerProcess(
                worker,
                self._settings,
                self._hosts,
                starter,
                self.oom_kills,
                self.gpu_readings,
                handlers,
                self._timing,
            )
            worker.process = process
            self.processes.append(process)
            process.start()

    async def stop(self) -> None:
        """Stop every worker within the grace time."""
        self.gpu_readings.stop()
        await asyncio.gather(*(process.stop() for process in self.processes))

    def check_devices(self, numbers: Iterable[int]) -> None:
        """Raise UsageError if a device does not exist."""
        for number in numbers:
            if not 0 <= number < len(self.workers):
                raise no_such_device(number, len(self.workers))

    async def wait_ready(self, worker: Worker) -> None:
        """Return when the worker can load models; a parked worker is woken.

        Raises Unavailable: the worker did not come up in time.
        """
        self.wake(worker.number)
        limit_s = _RESTART_TIMEOUT_S if worker.state == "down" else _READY_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                while not worker.is_ready:
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            raise Unavailable(
                f"worker {worker.number} is {worker.state}", "see `gpupool logs`"
            ) from None

    def end_loads(self, name: str, reason: str) -> None:
        """Kill and replace the workers that load a model now."""
        for process in self.processes:
            if name in process.loads:
                process.end(reason)

    async def park(self, number: int) -> None:
        """End a worker without requests, until it is woken; return after its process."""
        worker = self.workers[number]
        self.processes[number].park()
        while worker.state == "parked" and worker.pid is not None:
            await asyncio.sleep(_READY_POLL_S)

    def wake(self, number: int) -> None:
        """Start a worker if it is parked."""
        if self.processes:
            self.processes[number].wake()

    @property
    def up(self) -> list[Worker]:
        """Workers that are ready or start; all workers if all are down or parked."""
        up = [worker for worker in self.workers if worker.state not in ("down", "parked")]
        return up or self.workers

    async def device_sizes(self, *, of_all: bool = False) -> list[int]:
        """Return the memory in bytes of the devices whose workers are ready.

        Wait until one worker is ready; with ``of_all`` until each is ready or did not come up in
        time.

        Raises Unavailable: no worker came up in time.
        """
        if of_all or not self.any_ready:
            waits = [asyncio.create_task(self.wait_ready(worker)) for worker in self.workers]
            try:
                errors = await _outcomes(waits, of_all=of_all)
            finally:
                for wait in waits:
                    wait.cancel()
            if len(errors) == len(waits):
                raise errors[0]
        ready = [worker.ready for worker in self.workers if worker.is_ready]
        return [answer.facts.device_bytes for answer in ready if answer is not None]

    async def load(
        self,
        worker: Worker,
        model: m.ModelToLoad,
        snapshot: CachedSnapshot | None,
        profiling_budget_s: float = 0.0,
        kv_identity: str = "",
    ) -> tuple[m.ModelLoaded, int | None]:
        """Load or replace a model on a worker; return its facts and a descriptor of the snapshot.

        The descriptor is None from a device without snapshots. Steps are then profiled for at most
        ``profiling_budget_s``. The caller holds ``worker.load_lock``.

        Raises:
            WorkerIsDown: the worker is down.
            WorkerEnded: the worker ended before answering.
            GpupoolError: the worker's reason.
            TimedOut: the load exceeded the configured time.
        """
        if not worker.is_ready:
            raise WorkerIsDown(f"worker {worker.number} is {worker.state}", "see `gpupool logs`")
        await worker.unloading.settled(model.name)
        # The phase stays if the caller does not wait for the end of the load.
        host = self._hosts.of(model.name, worker.number)
        if not host.is_ordered:
            host.move(HostEvent.LOAD)
        digest, self_check = (
            ("", ()) if snapshot is None else (snapshot.digest, snapshot.self_check)
        )
        given, budget_s = snapshot is not None, profiling_budget_s
        order = m.LoadModel(model, given, digest, budget_s, self_check, kv_identity)
        worker.send(order, () if snapshot is None else (snapshot.fd,))
        limit_s = self._settings.limits.load_timeout_s
        load: Load = asyncio.get_running_loop().create_future()
        worker.loads[model.name].append(load)
        try:
            async with asyncio.timeout(limit_s):
                return await load
        except BaseException as error:
            if load.done() and not load.cancelled() and load.exception() is None:
                _, fd = load.result()  # came too late
                if fd is not None:
                    os.close(fd)
            if not isinstance(error, TimeoutError):
                raise
            raise TimedOut(
                f"{model.name}: not loaded within {limit_s:g} s", "raise limits.load_timeout"
            ) from None

    def forget_prefixes(self, model: str) -> None:
        """Free the KV of a removed model's ended requests on all workers."""
        for worker in self.workers:
            worker.send(m.ForgetPrefixes(model))

    async def unload(self, worker: Worker, name: str, *, keeps_engine: bool = False) -> None:
        """Drop a model from a worker; return when the memory is free.

        With ``keeps_engine`` the worker keeps the engine for the next load.
        """
        await worker.unloading.settled(name)
        host = self._hosts.of(name, worker.number)
        if not host.is_ordered:
            return
        host.move(HostEvent.UNLOAD)
        worker.send(m.UnloadModel(name, keeps_engine))
        try:
            await self._answer(worker, worker.unloading, name, f"unload {name}")
        finally:
            if host.phase is HostPhase.UNLOADING:
                host.move(HostEvent.UNLOADED)

    async def give_snapshot(self, worker: Worker, name: str, snapshot: CachedSnapshot) -> None:
        """Attach a snapshot of the right layout to a model on a worker; return when attached.

        Raises:
            Failed: the worker cannot map or pin the snapshot, or is down.
            TimedOut: the worker did not answer.
        """
        if not worker.is_ready:
            raise Failed(f"worker {worker.number} is {worker.state}")
        host = self._hosts.of(name, worker.number)
        worker.send(m.TakeSnapshot(name), (snapshot.fd,))
        try:
            what = f"attach the snapshot of {name}"
            problem = await self._answer(worker, worker.taking, name, what)
        except BaseException:
            worker.send(m.DropSnapshot(name))  # undoes a late success
            raise
        if problem:
            raise Failed(
                f"worker {worker.number} cannot attach the snapshot of {name}: {problem}",
                "see `gpupool logs`",
            )
        if host.phase is HostPhase.LOADED:  # else the worker has ended after the answer
            host.move(HostEvent.ATTACH)

    async def drop_snapshot(self, worker: Worker, name: str) -> None:
        """Make a worker release a model's snapshot; return after the release."""
        host = self._hosts.of(name, worker.number)
        if not host.has_snapshot:
            return
        host.move(HostEvent.DETACH)
        worker.send(m.DropSnapshot(name))
        await self._answer(worker, worker.dropping, name, f"release the snapshot of {name}")

    async def call(
        self, worker: Worker, method: str, /, *, limit_s: float | None = None, **arguments: object
    ) -> object:
        """Run a named operation on a worker between two steps.

        ``limit_s`` None means the load timeout, because a load may have to finish before.

        Raises:
            Unavailable: the worker starts, or is down or parked.
            GpupoolError: the operation's error.
            TimedOut: no answer within ``limit_s``.
        """
        if not worker.is_ready:
            raise Unavailable(f"worker {worker.number} is {worker.state}")
        call_id = worker.calls.next_id()
        worker.send(m.Call(call_id, method, dict(arguments)))
        return await self._answer(worker, worker.calls, call_id, f"answer {method}", limit_s)

    async def _answer(
        self,
        worker: Worker,
        pending: Pending[K, V],
        key: K,
        what: str,
        limit_s: float | None = None,
    ) -> V:
        limit_s = limit_s or self._settings.limits.load_timeout_s
        try:
            return await pending.answer(key, limit_s)
        except TimeoutError:
            raise TimedOut(
                f"worker {worker.number} did not {what} within {limit_s:g} s", "see `gpupool logs`"
            ) from None

    def reconfigure(self) -> None:
        for process in self.processes:
            process.reconfigure()


async def _outcomes(waits: list[asyncio.Task[None]], *, of_all: bool) -> list[BaseException]:
    """Wait for the first success, or for all; return the errors until then."""
    errors: list[BaseException] = []
    for wait in asyncio.as_completed(waits):
        try:
            await wait
        except Unavailable as error:
            errors.append(error)
        else:
            if not of_all:
                break
    return errors
