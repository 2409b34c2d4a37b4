"""The record of a worker, its supervised process, and its role."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpupoold.config.schema import Settings
from gpupoold.config.sections import DeviceSettings
from gpupoold.control.fleet.states import HostEvent, HostPhase, Hosts
from gpupoold.control.processes.child import Calls, Child, Pending, Starter
from gpupoold.control.processes.supervised import (
    Death,
    OomKills,
    ProcessHandlers,
    Supervised,
    Timing,
    Watch,
    death_of,
)
from gpupoold.domain import Role
from gpupoold.errors import Failed, error_from_code
from gpupoold.system.activity import ThreadPhase, create_page, read_page
from gpupoold.system.nvml import NO_READING, GpuReadings, Reading
from gpupoold.system.process import OUT_OF_DEVICE_MEMORY_STATUS, as_words
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

# Left free beside the reserve after a first lack of device memory, doubled after each further one
# up to an eighth of the memory of the pages, and halved for each hour without one.
_FIRST_SPARE_BYTES = 512 << 20
_SPARE_DIVISOR = 8
_CALM_S = 3600.0
# Left free beside the reserve for the programs that draw on a GPU with a display.
_DISPLAY_BYTES = 1 << 30

Load = asyncio.Future[tuple[m.ModelLoaded, int | None]]
"""The answer to an order to load, with a descriptor of the snapshot; done if nobody waits."""


class WorkerProcess(Supervised[m.FromWorker]):
    """Updates ``worker`` from the messages and ends of the process."""

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        hosts: Hosts,
        starter: Starter,
        oom_kills: OomKills,
        gpu_readings: GpuReadings,
        handlers: ProcessHandlers[Worker, m.FromWorker],
        timing: Timing,
    ) -> None:
        super().__init__(f"worker {worker.number}", settings, timing)
        self._worker = worker
        self._hosts = hosts
        self._starter = starter
        self._oom_kills = oom_kills
        self._gpu_readings = gpu_readings
        self._handlers = handlers
        self._activity_fd = -1
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._is_parking = False
        self._spare_bytes = 0
        self._lacked_at_s = 0.0
        self._clock = timing.clock

    @property
    def is_excused(self) -> bool:
        return self._worker.calls.oldest is not None

    def park(self) -> None:
        """End the process, without another until :meth:`wake`; the worker has no requests."""
        if self._child is None:
            return
        self._worker.state, self._is_parking = "parked", True
        self._may_run.clear()
        grace_s = self._settings.limits.stop_grace_s
        self.send(m.Shutdown(grace_s))
        self._keep(self._kill_after(self._child, grace_s), f"{self.name}-parks")

    def wake(self) -> None:
        """Start a parked worker; no effect on others."""
        if self._worker.state == "parked":
            self._worker.state = "starting"
            self._may_run.set()

    async def _kill_after(self, child: Child[m.FromWorker], grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        if self._child is child:
            child.kill()

    async def _pause(self) -> bool:
        if not self._is_parking:
            return False
        self._is_parking = False
        self._forget(f"{self.name} is parked")
        _logger.info("%s is parked", self.name)
        await self._may_run.wait()
        return True

    async def stop(self) -> None:
        await super().stop()
        self._worker.state = "down"
        self._forget("the daemon is stopping")
        self._drop_kv_host()

    def _drop_kv_host(self) -> None:
        """Let go of the KV host cache of the latest process that came up."""
        worker = self._worker
        if worker.kv_host_fd is not None:
            os.close(worker.kv_host_fd)
            worker.kv_host_fd = None

    @property
    def loads(self) -> set[str]:
        """The models that the process loads now, by its activity page."""
        if self._child is None:
            return set()
        activities = read_page(self._activity_fd)
        return {activity.model for activity in activities if activity.phase is ThreadPhase.LOAD}

    async def _run_once(self) -> bool:
        """Run one process with a separate activity page, see :meth:`Supervised._run_once`."""
        self._activity_fd = create_page()
        try:
            return await super()._run_once()
        finally:
            os.close(self._activity_fd)

    async def _launch(self) -> Child[m.FromWorker]:
        worker = self._worker
        if not worker.has_come_up:
            self._drop_kv_host()  # the memory itself may be at fault
        worker.state, worker.has_come_up, worker.has_loaded = "starting", False, False
        self._spare_less()
        reading = await self._gpu_readings.first_of(worker.number)
        spare_bytes = self._spare_bytes + (_DISPLAY_BYTES if reading.has_display else 0)
        fds = {"--activity-fd": self._activity_fd, "--kv-host-fd": worker.kv_host_fd}
        return await Child.start(
            self.name,
            module_of(worker.device),
            arguments_of(self._settings, worker.number, spare_bytes),
            m.FromWorker,
            self.log_path,
            fd_options={name: fd for name, fd in fds.items() if fd is not None},
            starter=self._starter,
        )

    async def _set_up(self) -> None:
        await self._handlers.on_up(self._worker)

    async def _death(self, status: int | None, ended_for: str) -> Death:
        activities = read_page(self._activity_fd)
        saw_oom_kill = self._oom_kills.is_new()
        death = death_of(status, ended_for, activities, saw_oom_kill=saw_oom_kill)
        if status == OUT_OF_DEVICE_MEMORY_STATUS and self._spare_more():
            spare = f"{format_bytes(self._spare_bytes)} stay free beside memory.reserve"
            death = replace(death, reason=f"{death.reason}; from now on {spare}")
        fault = await self._gpu_readings.fault_of(self._worker.number) if death.is_at_fault else ""
        if not fault:
            return death
        return replace(death, reason=f"{death.reason}; {fault}", is_of_device=True)

    def _spare_more(self) -> bool:
        """Leave more of each GPU free from the next start on; return False at the limit.

        Other programs took memory, or steps need more than the reserve: with the same pages the
        next process would end too.
        """
        ready, before = self._worker.ready, self._spare_bytes
        if ready is None:
            return False
        most_bytes = ready.facts.device_bytes // self._worker.device.num_gpus // _SPARE_DIVISOR
        wanted_bytes = max(_FIRST_SPARE_BYTES, 2 * before)
        self._spare_bytes = max(before, min(wanted_bytes, most_bytes))
        self._lacked_at_s = self._clock()
        return self._spare_bytes > before

    def _spare_less(self) -> None:
        """Halve what stays free for each hour since the latest lack: others may have ended."""
        num_hours = int((self._clock() - self._lacked_at_s) / _CALM_S)
        self._lacked_at_s += num_hours * _CALM_S
        self._spare_bytes >>= num_hours
        if self._spare_bytes < _FIRST_SPARE_BYTES:
            self._spare_bytes = 0

    async def _note_end(self, death: Death) -> bool:
        """Report the end; an end is excused if the worker came up and is not at fault."""
        self._worker.state = "down"
        await self._handlers.on_down(self._worker, death)
        return self._worker.has_come_up and not death.is_at_fault

    def _note(self, message: m.FromWorker, watch: Watch, now_s: float) -> None:
        worker = self._worker
        watch.seen(now_s)
        match message:
            case m.WorkerReady():
                watch.came_up(now_s)
                self._note_ready(message)
            case m.ModelLoaded():
                self._note_loaded(message)
            case m.ModelFailed():
                self._note_failed(message)
            case m.ModelUnloaded():
                if message.is_engine_kept:
                    self._hosts.keep_engine(message.name, worker.number)
                else:
                    self._hosts.freed(message.name, worker.number, message.freed.device_bytes)
                worker.unloading.resolve(message.name, None)
            case m.GraphsCaptured():
                self._hosts.of(message.model, worker.number).graphs = message.graphs
            case m.SnapshotDropped():
                worker.dropping.resolve(message.model, None)
            case m.SnapshotTaken():
                worker.taking.resolve(message.model, message.problem)
            case m.CallResult():
                worker.calls.answered(message, message.result)
            case m.WorkerStatus():
                worker.status, activity = message, message.activity
                on_turn = [held for held in message.models if held.model == activity.on_turn]
                loading = message.loading
                is_held = loading is not None and loading.holds_turns
                has_work = not is_held and any(held.num_live for held in on_turn)
                watch.stepped(now_s, activity.num_steps, has_work=has_work)
                if loading is None:
                    watch.loads("", 0.0)
                else:
                    watch.loads(loading.model, loading.began_s)
            case _:
                self._handlers.on_message(worker, message)

    def _note_ready(self, message: m.WorkerReady) -> None:
        worker = self._worker
        worker.ready = message
        self._drop_kv_host()
        if message.shares_kv_host:
            worker.kv_host_fd = self.take_fd()
        worker.state, worker.has_come_up = "ready", True
        self._begin_set_up()

    def _note_loaded(self, message: m.ModelLoaded) -> None:
        worker, name = self._worker, message.model.name
        fd = self.take_fd() if message.has_snapshot else None
        host = self._hosts.of(name, worker.number)
        is_replaced = host.phase in (HostPhase.LOADED, HostPhase.ATTACHED)
        load = worker.answered_load(name)
        if load is not None and (is_replaced or host.phase is HostPhase.LOADING):
            self._hosts.loaded(name, worker.number, message.engine_of, message.family)
            has_snapshot = message.has_snapshot
            host.loaded(message.layout_digest, message.memory, has_snapshot=has_snapshot)
            host.load, host.since_s = message.stages, time.monotonic()
            host.resident_bytes, host.graphs = message.resident_bytes, message.graphs
            host.why_unshared = message.why_unshared
            load.set_result((message, fd))
        elif fd is not None:
            os.close(fd)  # the caller no longer waits, and unloads the model or replaces the engine
        if message.dropped:  # by the earlier engine, also if nobody waits for the new one
            self._handlers.on_message(worker, message)

    def _note_failed(self, message: m.ModelFailed) -> None:
        load = self._worker.answered_load(message.name)
        if load is not None:
            host = self._hosts.of(message.name, self._worker.number)
            if host.phase is HostPhase.LOADING:
                host.move(HostEvent.FAIL)
            load.set_exception(error_from_code(message.error_code, message.message, message.hint))

    def _forget(self, reason: str) -> None:
        super()._forget(reason)
        worker = self._worker
        ended = WorkerEnded(reason, "see `gpupool logs`")
        for load in (load for loads in worker.loads.values() for load in loads if not load.done()):
            load.set_exception(ended)
        worker.loads.clear()
        worker.taking.reject_all(ended)
        worker.calls.reject_all(ended)
        worker.unloading.resolve_all(None)
        worker.dropping.resolve_all(None)
        self._hosts.lose_worker(worker.number)
        worker.status = None
        worker.missing_bytes.clear()


def unbound_bytes(model: str, workers: Iterable[Worker]) -> dict[int, int]:
    """Return a model's weights that stay on devices without an engine, by device."""
    return {
        worker.number: num_bytes
        for worker in workers
        if worker.status and (num_bytes := worker.status.unbound_bytes.get(model))
    }


def module_of(device: DeviceSettings) -> str:
    return "gpupoold.simdevice" if device.kind == "sim" else "gpupoold.worker"


def arguments_of(settings: Settings, number: int, spare_bytes: int = 0) -> list[str]:
    """Return the command-line options of a device's worker.

    ``spare_bytes`` of each GPU stay free beside the reserve.
    """
    device = settings.devices[number]
    reserve_bytes = settings.memory.reserve_for(device.kind)
    kept_bytes = reserve_bytes + spare_bytes
    options: dict[str, object] = {
        "--device": number,
        "--device-bytes": max(0, (device.memory_bytes or 0) - kept_bytes),
        "--log-level": settings.log.level,
    }
    if device.kind == "sim":
        options |= {"--gpu": device.gpu, "--num-gpus": device.num_gpus}
        if settings.simulated_host.memory_bytes is not None:
            options["--kv-host-bytes"] = settings.memory.kv_host_bytes
    else:
        options |= {
            "--device-kind": device.kind,
            "--num-gpus": device.num_gpus,
            "--are-cores-shared": int(_num_computing(settings) > len(os.sched_getaffinity(0))),
            "--gpus": ",".join(map(str, device.gpus)) or "0",
            "--reserve-bytes": reserve_bytes,
            "--spare-bytes": spare_bytes,
            "--page-bytes": device.page_bytes or 0,
            "--link-bytes-per-s": device.link_bytes_per_s or 0,
            "--pin-bytes-per-s": device.pin_bytes_per_s or 0,
            "--pinned-limit-bytes": -1
            if device.pinned_limit_bytes is None
            else device.pinned_limit_bytes,
            "--locks": settings.paths.state_dir,
            "--kv-host-bytes": settings.memory.kv_host_bytes,
            "--compute-threads": compute_threads(settings),
            "--are-threads-set": int("OMP_NUM_THREADS" in os.environ),
            "--num-sharing": max(1, sum(other.gpus == device.gpus for other in settings.devices))
            if device.kind == "cuda"
            else 1,
        }
        if settings.memory.prefix_cache_bytes is not None:
            options["--prefix-cache-bytes"] = settings.memory.prefix_cache_bytes
        if settings.memory.kv_files_bytes:
            options["--kv-files"] = settings.kv_folder
            options["--kv-files-bytes"] = settings.memory.kv_files_bytes
    return as_words(options)


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return variables for the number of threads, and on emulated devices for copies in memory.

    The C library then copies pieces of some MiB past the processor's caches, which the engine
    needs; such copies are 1.5 times as fast.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(compute_threads(settings)))
    found = {"OMP_NUM_THREADS": threads}
    if any(device.kind == "emulated" for device in settings.devices):
        tunable = "glibc.cpu.x86_non_temporal_threshold=0x40000"
        others = os.environ.get("GLIBC_TUNABLES")
        found["GLIBC_TUNABLES"] = f"{others}:{tunable}" if others else tunable
    return found


def compute_threads(settings: Settings) -> int:
    """Return the compute threads per GPU of an emulated device.

    One core stays free for the daemon and the frontend, as in vLLM's API server: compute threads
    spin, and a spinning thread without a core stalls all compute threads.
    """
    return max(1, (len(os.sched_getaffinity(0)) - 1) // max(1, _num_computing(settings)))


def _num_computing(settings: Settings) -> int:
    return sum(device.num_gpus for device in settings.devices if device.kind != "sim")


class WorkerEnded(Failed):
    """The worker ended before answering."""


class WorkerIsDown(WorkerEnded):
    """The worker was down before the order, and so did not end because of the order."""


@dataclass(eq=False, slots=True)
class Worker:
    """A worker and its awaited answers; ``process`` is None before the start.

    ``has_come_up`` is true if the present or last process has been ready, ``has_loaded`` if the
    process has loaded the models of its start. ``loads`` has the loads of each model that were
    ordered and not answered; a worker carries out loads in order. ``kv_host_fd`` is the descriptor
    of the KV host cache of the latest process that came up, for other workers and for the next
    process. ``missing_bytes`` are those that models lack on the device to run, as last reported.
    """

    number: int
    device: DeviceSettings
    state: str = "starting"
    has_come_up: bool = False
    has_loaded: bool = False
    load_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # a worker has one load at a time
    num_loads: int = 0  # that run or wait for the lock
    process: Supervised[m.FromWorker] | None = None
    ready: m.WorkerReady | None = None
    status: m.WorkerStatus | None = None
    reading: Reading = NO_READING
    loads: defaultdict[str, deque[Load]] = field(default_factory=lambda: defaultdict(deque))
    unloading: Pending[str, None] = field(default_factory=Pending)
    taking: Pending[str, str] = field(default_factory=Pending)
    dropping: Pending[str, None] = field(default_factory=Pending)
    calls: Calls[object] = field(default_factory=Calls)
    kv_host_fd: int | None = None
    missing_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """True if the worker can load and serve models."""
        return self.state == "ready"

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self.process is None else self.process.pid

    @property
    def num_restarts(self) -> int:
        """Number of processes that ended and were or will be replaced."""
        return 0 if self.process is None else self.process.num_restarts

    @property
    def resident(self) -> frozenset[str]:
        """Models whose weights were completely on the device at the latest report."""
        models = self.status.models if self.status else []
        return frozenset(
            held.model for held in models if held.weights_resident_bytes == held.weights_total_bytes
        )

    def answered_load(self, name: str) -> Load | None:
        """Return the load of a model that the worker has answered, None if nobody waits for it."""
        load = self.loads[name].popleft() if self.loads[name] else None
        return None if load is None or load.done() else load

    def take_fd(self) -> int:
        """Return the descriptor of the latest message, owned by the caller."""
        assert self.process is not None
        return self.process.take_fd()

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, unless the worker is down."""
        if self.process is not None:
            self.process.send(message, fds)


class Roles:
    """Roles by worker: set by an operator or in the configuration, else chosen by the policy."""

    def __init__(self, fixed: Sequence[Role | None] = ()) -> None:
        """``fixed`` are the roles of workers 0, 1, ...; None leaves the choice to the policy."""
        self._fixed = dict(enumerate(fixed))
        self._chosen: dict[int, Role] = {}

    def of(self, number: int) -> tuple[Role, bool]:
        """Return a worker's role, and whether an operator fixed the role."""
        fixed = self._fixed.get(number)
        return fixed or self._chosen.get(number, Role.MIXED), fixed is not None

    def fix(self, number: int, role: Role | None) -> None:
        """Fix a worker's role; None leaves the choice to the policy."""
        if role is None:
            self._chosen[number], _ = self.of(number)  # until the policy changes the role
        self._fixed[number] = role

    def chosen(self, number: int, role: Role) -> None:
        self._chosen[number] = role


def configured_roles(settings: Settings) -> list[Role | None]:
    """Return the roles of the devices by number; None leaves the choice to the policy."""
    names = settings.scheduling.roles
    if names == "auto":
        return [None] * len(settings.devices)
    return [None if name == "auto" else Role(name) for name in names]
