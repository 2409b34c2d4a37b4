"""Construction of the control plane from its parts."""

from __future__ import annotations

import socket

from gpupool_state import Database, History, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.access.keyring import Keyring
from gpupoold.control.access.membership import FleetMembership
from gpupoold.control.accounting.model_stats import Minutes
from gpupoold.control.configuration import Configuration
from gpupoold.control.control_plane import ControlPlane, Health
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.frontends.frontends import Frontends
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.lifecycle import ModelLifecycle
from gpupoold.control.models.parts import ControlParts
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.reload import Reloader
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.requests.replies import WaitReports
from gpupoold.control.views.explain import Explainer
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.fd_store import StoredSnapshots
from gpupoold.control.weights.host_budget import CacheSetting
from gpupoold.control.weights.keys import SnapshotKeys
from gpupoold.control.weights.saved_snapshots import SavedSnapshots
from gpupoold.control.worker_operations import WorkerOperations
from gpupoold.control.workers.process import engine_environment
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.replay.log_file import Header
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.system.listeners import why_keys_are_required
from gpupoold.system.nvml import GpuReadings
from gpupoold.system.systemd import FdStore


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
    operations = WorkerOperations(settings.limits, dispatcher, supervisor.workers)
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
        reloader=Reloader(
            configuration, history, dispatcher, supervisor, frontends, operations, cache_control
        ),
        policy=header,
        health=Health(fleet, dispatcher, supervisor),
        minutes=Minutes(history, dispatcher.accounts.stats),
        explainer=Explainer(registry, history, dispatcher, fleet, supervisor.workers, cache),
        wait_reports=WaitReports(dispatcher.live, dispatcher.state, frontends.send_to),
        keyring=keyring,
        membership=FleetMembership(
            settings.paths.state_dir, settings.paths.download_dir, history, frontends.send
        ),
        http_url=_url(listener, settings),
        gpu_readings=GpuReadings(settings.devices),
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
    """Return the modules that the fork server imports."""
    has_emulated = any(device.kind == "emulated" for device in settings.devices)
    worker = ["gpupoold.worker.preload"] if has_emulated else []
    return ["gpupoold.frontend.preload", *worker]
