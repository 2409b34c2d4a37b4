"""Wires the parts of the control plane together."""

from __future__ import annotations

import shutil
import socket

from gpupool_state import History, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.access.keyring import Keyring
from gpupoold.control.accounting.minutes import Minutes
from gpupoold.control.configuration import Configuration
from gpupoold.control.control_plane import Pool
from gpupoold.control.frontends.frontends import Frontends
from gpupoold.control.health import Health
from gpupoold.control.models.cache_control import CacheControl
from gpupoold.control.models.lifecycle import ModelLifecycle
from gpupoold.control.models.unloading import ModelUnloader
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.reload import Reloader, configured_roles
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.views.explain import Explainer
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.fd_store import StoredSnapshots
from gpupoold.control.weights.keys import SnapshotKeys
from gpupoold.control.weights.saved_snapshots import SavedSnapshots
from gpupoold.control.worker_operations import WorkerOperations
from gpupoold.control.workers.launch import engine_environment
from gpupoold.control.workers.nvml import GpuReadings
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.replay.log_file import Header
from gpupoold.scheduling.policies.named import PolicyOptions, make_policy
from gpupoold.system.systemd import FdStore


def build_pool(
    configuration: Configuration,
    registry: Registry,
    history: History,
    listener: socket.socket,
    fd_store: FdStore,
    keyring: Keyring,
) -> Pool:
    """Wire the parts together without starting any."""
    settings = configuration.settings
    options = PolicyOptions(quota_max_s=settings.scheduling.quota_max_s)
    header = Header(settings.scheduling.policy, options)
    policy = make_policy(header.policy, header.options)
    dispatcher = Dispatcher(settings.limits, history, policy, configured_roles(settings), keyring)
    cache = SnapshotCache(settings.memory.model_cache_bytes)
    snapshots_dir = settings.paths.state_dir / "snapshots"
    shutil.rmtree(settings.paths.state_dir / "images", ignore_errors=True)  # of earlier releases
    keys = SnapshotKeys()
    saved = SavedSnapshots(snapshots_dir, settings.memory.snapshot_files_bytes, keys)
    cache.fd_store = stored_snapshots = StoredSnapshots(fd_store, keys)

    forks = ForkServer(settings, engine_environment(settings), _preloaded(settings))
    supervisor = WorkerSupervisor(settings, forks)
    lifecycle = ModelLifecycle(
        settings, registry, history, dispatcher, supervisor, cache, saved, stored_snapshots
    )
    frontends = Frontends(settings, forks, listener)
    dispatcher.replies.send = frontends.send_to
    dispatcher.warmth = lifecycle.warmer
    dispatcher.isolation.verdicts = lifecycle.quarantine
    lifecycle.loader.frontends = keyring.frontends = frontends
    control = WorkerOperations(settings.limits, dispatcher, supervisor.workers)
    cache_control = CacheControl(registry, lifecycle, dispatcher.live, cache, saved)
    return Pool(
        settings=settings,
        registry=registry,
        history=history,
        dispatcher=dispatcher,
        forks=forks,
        supervisor=supervisor,
        frontends=frontends,
        lifecycle=lifecycle,
        cache=cache,
        saved=saved,
        cache_control=cache_control,
        workers=control,
        unloader=ModelUnloader(lifecycle, dispatcher, supervisor, cache, history),
        configuration=configuration,
        reloader=Reloader(
            configuration, history, dispatcher, supervisor, frontends, control, cache_control
        ),
        policy=header,
        health=Health(dispatcher, supervisor),
        minutes=Minutes(history, dispatcher.accounts.stats),
        explainer=Explainer(registry, history, dispatcher, lifecycle, supervisor.workers, cache),
        keyring=keyring,
        http_url=_url(listener, settings),
        gpu_readings=GpuReadings(settings.devices),
    )


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
