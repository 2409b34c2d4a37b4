"""The control plane for the admin API: one object with all parts, and its construction."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psutil

from gpupool_state import Database, History, ModelRow, Registry
from gpupoold import __version__
from gpupoold.api.schemas import DeviceInfo, ModelUsage, Status
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.config.schema import Settings
from gpupoold.control.access import FleetMembership, Keyring
from gpupoold.control.accounting.meters import DeviceSample
from gpupoold.control.accounting.model_stats import Minutes
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.frontends import Frontend, Frontends
from gpupoold.control.live_requests import WaitReports
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.descriptions import model_info, with_parsers
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.lifecycle import ModelLifecycle
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.operations import Configuration, Reloader, WorkerOperations
from gpupoold.control.processes.child import ForkServer
from gpupoold.control.processes.supervised import Death, ProcessHandlers, Watchdog
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.views import bodies as views
from gpupoold.control.views.explain import Explainer
from gpupoold.control.weights.cache import CacheSetting, SnapshotCache
from gpupoold.control.weights.kept_snapshots import SavedSnapshots, SnapshotKeys, StoredSnapshots
from gpupoold.control.workers.worker import Worker, engine_environment
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import Failed, Refused, UsageError
from gpupoold.replay.log_file import Header, lines as log_lines
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.stats.histogram import WORK_BOUNDS_S, Histogram
from gpupoold.system.listeners import why_keys_are_required
from gpupoold.system.process import measure_lag
from gpupoold.system.systemd import FdStore
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)
_TICK_S = 1.0
_CHECK_INTERVAL_S = 5.0
_OPERATION_TIMEOUT_S = 3600.0

ControlPlaneState = Literal["starting", "ready", "stopping"]

# A round of checks is due every second; a busy machine may delay some.
_ROUND_TIMEOUT_S = 10.0
# The rounds also end requests without tokens; this is the time allowed for a late round.
_OVERDUE_S = 30.0


class Health:
    """Records each round of the periodic checks."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._round_s = clock()

    def check(self, now_s: float) -> None:
        """Record a round; to be called at its end."""
        self._round_s = now_s

    def failure_reason(self, now_s: float) -> str:
        """Return why the control plane makes no progress, empty without a problem.

        A hung worker is no reason here: the watchdog ends hung workers.
        """
        late_s = now_s - self._round_s
        if late_s > _ROUND_TIMEOUT_S:
            return f"workers and requests have not been checked for {late_s:.0f} s"
        limit_s = self._dispatcher.token_timeout_s + _OVERDUE_S
        stuck = self._dispatcher.live.silent_since(now_s - limit_s)
        if stuck:
            first = stuck[0]
            return f"{first.request_id} of {first.model} has waited too long for a token"
        return ""

    def summary(self) -> str:
        """Devices, models and requests, for ``systemctl status``."""
        workers = self._supervisor.workers
        num_ready = sum(worker.is_ready for worker in workers)
        return (
            f"{num_ready} of {len(workers)} devices ready, "
            f"{self._fleet.num_served()} models served, {len(self._dispatcher.live)} live requests"
        )


@dataclass(slots=True)
class ControlPlane(ControlParts):
    """All parts of the control plane, see :func:`build_control_plane`."""

    forks: ForkServer
    frontends: Frontends
    lifecycle: ModelLifecycle
    cache: SnapshotCache
    saved: SavedSnapshots
    cache_control: CacheControl
    workers: WorkerOperations
    configuration: Configuration
    reloader: Reloader
    policy: Header
    health: Health
    minutes: Minutes
    explainer: Explainer
    wait_reports: WaitReports
    keyring: Keyring
    membership: FleetMembership
    http_url: str
    stopping: bool = False
    loop_lag: Histogram = field(default_factory=lambda: Histogram(WORK_BOUNDS_S))
    _started_s: float = field(default_factory=time.monotonic)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, metrics_text: Callable[[], Awaitable[bytes]]) -> None:
        """Start the workers and the frontends, which come up in the background.

        ``metrics_text`` returns the text that the frontends serve as ``/metrics``.
        """
        of_worker, models = self.dispatcher.from_worker, self.lifecycle
        worker_up, worker_down = models.controller.worker_up, models.worker_down
        models.controller.start()
        self.supervisor.start(ProcessHandlers(of_worker, worker_up, worker_down))
        of_frontend = ProcessHandlers(self._from_frontend, self._set_up, self._frontend_down)
        self.frontends.start(of_frontend, metrics_text)
        checks = (
            self._note_readings,
            self.supervisor.oom_kills.check,
            self.frontends.check,
            Watchdog((*self.supervisor.processes, *self.frontends), self.settings).check,
            self.dispatcher.end_overdue,
            self.dispatcher.tick,
            self.lifecycle.controller.check,
            self.lifecycle.parking.check,
            self.lifecycle.snapshots.check_nodes,
            self.health.check,
            self.keyring.tick,
            self.minutes.tick,
        )
        self._tasks = [
            asyncio.create_task(self._check_when_idle(), name="check-core"),
            asyncio.create_task(tick(checks), name="tick"),
            asyncio.create_task(measure_lag(self.loop_lag.add), name="loop-lag"),
            asyncio.create_task(self.keyring.run(), name="keys"),
        ]

    async def stop(self) -> None:
        """Stop the frontends, then the workers."""
        self.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.frontends.stop()
        await self.supervisor.stop()
        self.minutes.close()
        self.dispatcher.accounts.usage.close()
        await self.forks.stop()
        await self.lifecycle.stop()
        await self.saved.stop()
        await self.keyring.save()
        self.cache.close()

    @property
    def state(self) -> ControlPlaneState:
        if self.stopping:
            return "stopping"
        ready = self.supervisor.any_in_service and self.frontends.any_ready
        return "ready" if ready else "starting"

    async def models(self) -> list[ModelInfo]:
        """Return all registered models by name, with their present states."""
        return [self._info_of(row) for row in await self.registry.list()]

    async def model(self, name: str) -> ModelInfo:
        """Return a model with its present use."""
        row = await self.lifecycle.find(name)
        info = self._info_of(row)
        workers, now_s = self.supervisor.workers, time.monotonic()
        now = views.usage(
            info.name,
            info.state,
            self.dispatcher,
            workers,
            views.memories_of(workers),
            self.fleet.hosts.engines(),
            self.fleet,
            self.cache,
            now_s,
        )
        found = await self.lifecycle.inspector.parsers(row.spec)
        return with_parsers(replace(info, usage=ModelUsage(**now)), found)

    def devices(self) -> list[DeviceInfo]:
        limit_of = self.lifecycle.room.limit_bytes
        return views.devices(self.supervisor.workers, self.dispatcher, self.fleet, limit_of)

    async def status(self) -> Status:
        return self.status_of(len(await self.registry.list()))

    def status_of(self, num_models: int) -> Status:
        """Return the daemon's status for a known number of models."""
        tls_cert = self.settings.server.tls_cert
        readies = [i.ready for i in self.supervisor.workers if i.ready is not None]
        return Status(
            version=__version__,
            engine_version=readies[0].engine_version if readies else "",
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started_s,
            state=self.state,
            http_url=self.http_url,
            state_dir=str(self.settings.paths.state_dir),
            model_cache_bytes=self.cache.used_bytes,
            model_cache_limit_bytes=self.cache.budget_bytes,
            rss_bytes=psutil.Process().memory_info().rss,
            num_models=num_models,
            num_live_requests=len(self.dispatcher.live),
            num_refused_requests=sum(
                stat.so_far().refused for stat in self.dispatcher.accounts.stats.values()
            ),
            dropped_history_rows=self.history.dropped_rows,
            are_keys_required=self.keyring.are_required,
            num_keys=self.keyring.num_valid,
            tls_cert=None if tls_cert is None else str(tls_cert),
            frontends=views.frontends(self.frontends, self.dispatcher.live),
        )

    async def operate(
        self, number: int, operation: str, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Run an operation of the module in ``GPUPOOL_OPERATIONS`` on a worker.

        Raises:
            UsageError: there is no such worker or operation.
            Refused: the daemon's environment names no module.
        """
        worker = self.workers.worker(number)
        if not os.environ.get("GPUPOOL_OPERATIONS"):
            raise Refused(
                "this daemon has no operations for developers",
                "start gpupoold with GPUPOOL_OPERATIONS=benchmarks.in_worker in a checkout",
            )
        if "limit_s" in arguments:
            raise UsageError("an operation has no argument 'limit_s'")
        result = await self.supervisor.call(
            worker, operation, limit_s=_OPERATION_TIMEOUT_S, **arguments
        )
        if not isinstance(result, dict):
            raise Failed(f"{operation}: the answer is not an object")
        return result

    def event_log(self) -> Iterator[bytes]:
        """Return the lines of the core's event log; any thread may read the lines."""
        core = self.dispatcher.shell.core
        first = None if core.is_from_start else core.segments[0]
        return log_lines(self.policy, core.entries(), first)

    def _info_of(self, row: ModelRow) -> ModelInfo:
        return model_info(
            row, self.fleet.availability(row.spec.name).state, self.fleet.loaded(row.spec.name)
        )

    def _from_frontend(self, frontend: Frontend, message: m.FromFrontend) -> None:
        match message:
            case m.AskRate():
                frontend.send(self.keyring.begin(message))
            case m.AccessReport():
                self.keyring.reported(message)
            case m.BatchWaits():
                key = self.keyring.names.get(message.key_id, "")
                text = f"batch {message.batch_id}: {message.reason}"
                self.history.record_event("warning", "batch_waits", key, text)
            case m.Pong():
                self.dispatcher.accounts.paced(message.paced_gaps)
            case m.AskWaits():
                self.wait_reports.asked(frontend.number, message)
            case _:
                self.dispatcher.from_frontend(message)

    async def _set_up(self, frontend: Frontend) -> None:
        """Send the rules of access before the models: a frontend without rules refuses requests."""
        self.keyring.publish()
        self.membership.publish()
        await self.lifecycle.frontend_up(frontend)

    async def _frontend_down(self, frontend: Frontend, death: Death) -> None:
        text = f"ended ({death.reason}) and is restarted"
        self.history.record_event("error", "frontend_down", frontend.name, text)
        self.dispatcher.frontend_down(frontend.number)

    def _note_readings(self, _: float) -> None:
        for worker in self.supervisor.workers:
            worker.reading = self.supervisor.gpu_readings.of(worker.number)
        accounts = self.dispatcher.accounts
        accounts.usage.sample(
            _sample_of(worker, accounts.meters.devices[worker.number].switching_s)
            for worker in self.supervisor.workers
        )

    async def _check_when_idle(self) -> None:
        """Check the core's state while the daemon is idle; report each inconsistency once."""
        reported = ""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if len(self.dispatcher.live):
                continue
            try:
                check_state(self.dispatcher.state)
            except AssertionError as error:
                if str(error) != reported:
                    reported = str(error)
                    _logger.error("the state of the scheduling core is inconsistent: %s", error)
                    self.history.record_event("error", "core_inconsistent", "core", reported)

    async def check_integrity(self) -> list[object]:
        """Check the core's state and every worker's accounts.

        Raises Failed: an inconsistency, or a worker is down.
        """
        try:
            check_state(self.dispatcher.state)
        except AssertionError as error:
            raise Failed(f"the state of the scheduling core is inconsistent: {error}") from error
        calls = (self.supervisor.call(i, "check_integrity") for i in self.supervisor.workers)
        return [await call for call in calls]


async def tick(
    checks: Sequence[Callable[[float], None]],
    interval_s: float = _TICK_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call all of ``checks`` every ``interval_s`` with the monotonic time; errors are logged."""
    while True:
        for check in checks:
            try:
                check(clock())
            except Exception:
                _logger.exception("a periodic check failed")
        await asyncio.sleep(interval_s)


def _sample_of(worker: Worker, switching_s: float) -> DeviceSample:
    status = worker.status
    return DeviceSample(
        worker.number,
        worker.device.num_gpus,
        switching_s,
        worker.reading.energy_j,
        status.activity.kv_host_bytes + status.activity.prefix_bytes if status else 0,
        status.kv_host_slab_bytes if status else 0,
    )


async def build_control_plane(
    configuration: Configuration,
    database: Database,
    history: History,
    listener: socket.socket,
    fd_store: FdStore,
) -> ControlPlane:
    """Wire the parts together without starting any; each part gets only finished parts."""
    settings, registry = configuration.settings, Registry(database)
    header = Header(
        settings.scheduling.policy, PolicyOptions(quota_max_s=settings.scheduling.quota_max_s)
    )
    cache, saved, stored = _snapshot_stores(settings, fd_store)
    simulated = [i for i, device in enumerate(settings.devices) if device.kind == "sim"]
    degrees = [device.num_gpus for device in settings.devices]
    fleet = Fleet(cache, simulated, degrees)
    fleet.restore(await registry.list())
    forks = ForkServer(settings, engine_environment(settings), _preloaded(settings))
    frontends = Frontends(settings, forks, listener)
    supervisor = WorkerSupervisor(settings, forks, fleet.hosts)
    required_because = why_keys_are_required(settings.access, listener)
    host_names = (*settings.access.host_names, settings.server.host.lower())
    access = settings.access.model_copy(update={"host_names": host_names})
    keyring = Keyring(database, history, frontends.send, access, required_because)
    await keyring.load()
    policy = make_policy(header.policy, header.options)
    dispatcher = Dispatcher(settings, history, policy, fleet, frontends.send_to, keyring)
    parts = ControlParts(settings, registry, history, fleet, dispatcher, supervisor)
    snapshots = ModelSnapshots(parts, cache, saved, stored, lambda: _cache_setting(configuration))
    lifecycle = ModelLifecycle(parts, frontends, snapshots, cache, Inspector(settings, forks))
    dispatcher.listener = lifecycle
    await lifecycle.room.divisions.restore()
    operations = WorkerOperations(settings, dispatcher, supervisor.workers)
    cache_control = CacheControl(parts, lifecycle, cache, snapshots.host_budget, saved)
    return ControlPlane(
        *(settings, registry, history, fleet, dispatcher, supervisor),
        forks=forks,
        frontends=frontends,
        lifecycle=lifecycle,
        cache=cache,
        saved=saved,
        cache_control=cache_control,
        workers=operations,
        configuration=configuration,
        reloader=Reloader(parts, configuration, frontends, cache_control),
        policy=header,
        health=Health(fleet, dispatcher, supervisor),
        minutes=Minutes(history, dispatcher.accounts.stats),
        explainer=Explainer(parts, cache),
        wait_reports=WaitReports(dispatcher.live, dispatcher.state, frontends.send_to),
        keyring=keyring,
        membership=FleetMembership(
            settings.paths.state_dir, settings.paths.download_dir, history, frontends.send
        ),
        http_url=_url(listener, settings),
    )


def _snapshot_stores(
    settings: Settings, fd_store: FdStore
) -> tuple[SnapshotCache, SavedSnapshots, StoredSnapshots]:
    """Return the snapshots in host memory, on disk, and in the service manager."""
    folder, memory, keys = settings.paths.state_dir, settings.memory, SnapshotKeys()
    stored = StoredSnapshots(fd_store, keys)
    saved = SavedSnapshots(folder / "snapshots", memory.snapshot_files_bytes, keys)
    return SnapshotCache(memory.model_cache_bytes, stored), saved, stored


def _cache_setting(configuration: Configuration) -> CacheSetting:
    most_bytes = configuration.budgets.most_model_cache_bytes
    return CacheSetting(configuration.path, configuration.why_model_cache(), most_bytes)


def _url(listener: socket.socket, settings: Settings) -> str:
    scheme = "http" if settings.server.tls_cert is None else "https"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def _preloaded(settings: Settings) -> list[str]:
    has_emulated = any(device.kind == "emulated" for device in settings.devices)
    worker = ["gpupoold.worker.process"] if has_emulated else []
    return ["gpupoold.frontend.preload", *worker]
