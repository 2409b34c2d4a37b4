"""What the doctor thinks of facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpupoold.doctor.checks import Verdict, check_all
from gpupoold.doctor.facts import (
    DaemonFacts,
    Facts,
    GpuFacts,
    KernelFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    NumaFacts,
)
from tests.unit.doctor.samples import GIB, NO_DAEMON, STATE_DIR, bad, database, healthy, settings


def gpu(**changes: Any) -> GpuFacts:
    one = replace(healthy().gpu.gpus[0], **changes)
    return replace(healthy().gpu, gpus=(one, one))


def memory(**changes: Any) -> MemoryFacts:
    return replace(healthy().memory, **changes)


def torch(version: str | None) -> Facts:
    return versions(installed=healthy().versions.installed | {"torch": version})


def versions(**changes: Any) -> Facts:
    return healthy(versions=replace(healthy().versions, **changes))


def state_dir(**changes: Any) -> Facts:
    return healthy(folders=(replace(STATE_DIR, **changes),))


def emulated(**changes: Any) -> Facts:
    return healthy(settings=settings(devices=["emulated"]), **changes)


def test_a_machine_on_which_all_is_well() -> None:
    assert bad(healthy()) == {}
    names = [one.name for one in check_all(healthy())]
    assert len(names) == len(set(names)) > 15
    assert all(one.found and not one.fix for one in check_all(healthy()))


def test_a_simulated_device_needs_next_to_nothing() -> None:
    facts = healthy(
        settings=settings(devices=["sim:16xH800"]),
        gpu=GpuFacts(problem="NVML Shared Library Not Found"),
        memory=MemoryFacts(GIB, GIB),
        versions=replace(healthy().versions, installed={}),
        kernel=KernelFacts("5.4.0", {"moving pages": "Invalid argument"}),
        limits=LimitFacts("this shell", 65536, None, 0),
    )
    assert bad(facts) == {}


def test_another_checked_engine_comes_with_its_torch() -> None:
    installed = healthy().versions.installed | {"vllm": "0.33.0", "torch": "2.14.0+cu130"}
    assert bad(versions(installed=installed)) == {}
    installed |= {"vllm": "0.33.1"}
    assert bad(versions(installed=installed)).keys() == {"vllm", "torch"}


def test_an_emulated_device_works_under_wsl() -> None:
    assert bad(emulated(kernel=KernelFacts("6.6.87-microsoft-standard-WSL2"))) == {}


FAULTS: list[tuple[str, Facts, str, str]] = [
    ("config", healthy(settings=None, problem="line 3: no", fix="do"), "line 3", "do"),
    ("books", healthy(daemon=DaemonFacts(unsound="page 7 is used twice")), "page 7", "restart"),
    ("database", healthy(database=database(problem="page 3: torn")), "torn", ".recover"),
    ("database", healthy(database=database(schema=6)), "schema 6", "bak-5"),
    ("http", healthy(network=NetworkFacts("h:1", "Address already in use")), "h:1", "ss -ltnp"),
    (
        "admin socket",
        healthy(network=NetworkFacts("h:1", "", Path("/x" * 60))),
        "120 bytes",
        "runtime_dir",
    ),
    ("torch", torch(None), "not installed", "pip install torch==2.13.0"),
    ("torch", torch("2.12.0+cu130"), "2.13.0 is needed", "pip install torch==2.13.0"),
    ("gpu driver", versions(cuda=None), "CPUs only", "GPUPOOL_DEVICE=cuda"),
    (
        "compilers",
        versions(lacking=("g++", "Python.h"), python="3.11.2"),
        "without g++, Python.h",
        "apt install gcc g++ libc6-dev python3.11-dev",
    ),
    (
        "gpu driver",
        healthy(gpu=replace(healthy().gpu, cuda=(12, 8))),
        "built for CUDA 13.0",
        "driver 580 or newer",
    ),
    ("gpu driver", healthy(gpu=GpuFacts(problem="not found")), "NVML", "nvidia-smi"),
    (
        "gpu",
        emulated(missing_gpus=("no NVIDIA GPU was found", "modprobe")),
        "no NVIDIA",
        "modprobe",
    ),
    ("gpu 1", healthy(gpu=replace(gpu(), gpus=gpu().gpus[:1])), "has 1", "[[device]]"),
    ("gpu 0", healthy(gpu=gpu(is_mig=True)), "MIG is on", "nvidia-smi -i 0 -mig 0"),
    ("memory", healthy(memory=memory(total_bytes=8 * GIB)), "9.47 GiB are needed", "devices"),
    ("memory", healthy(memory=memory(limit_bytes=8 * GIB)), "limit is 8 GiB", "MemoryMax="),
    (
        "memory",
        healthy(settings=settings(memory={"model_cache": "300GiB"})),
        "memory.model_cache 300 GiB",
        "lower memory.model_cache",
    ),
    ("overcommit", healthy(memory=memory(overcommit=2)), "is 2", "overcommit_memory=0"),
    ("open files", healthy(limits=LimitFacts("x", 256, None, None)), "256 (x)", "LimitNOFILE"),
    (
        "address space",
        healthy(limits=LimitFacts("x", None, None, None, 1 << 30)),
        "at most 1 GiB (x)",
        "LimitAS",
    ),
    ("folder state_dir", state_dir(is_writable=False), "cannot be written", "daemon's user"),
    (
        "folder state_dir",
        state_dir(is_writable=False, exists=False),
        "cannot be created",
        "daemon's user",
    ),
    ("folder state_dir", state_dir(filesystem="nfs4"), "local disk", "paths.state_dir"),
    ("folder state_dir", state_dir(filesystem="fuse.sshfs"), "local disk", "paths.state_dir"),
    ("folder state_dir", state_dir(free_bytes=10), "10 B free", "free some space"),
    ("kernel", healthy(kernel=KernelFacts("5.0", {"pidfd": "no"})), "5.0: pidfd", "5.3 or newer"),
    (
        "kernel",
        emulated(kernel=KernelFacts("5.12", {"pidfd": "a", "moving pages": "b"})),
        "moving pages does not work: b",
        "5.13 or newer",
    ),
]


@pytest.mark.parametrize(
    ("name", "facts", "found", "fix"), FAULTS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FAULTS)]
)
def test_faults(name: str, facts: Facts, found: str, fix: str) -> None:
    check = bad(facts)[name]
    assert check.verdict is Verdict.FAULT
    assert found in check.found
    assert fix in check.fix


WARNINGS: list[tuple[str, Facts, str, str]] = [
    ("daemon", healthy(daemon=NO_DAEMON), "no daemon answers", "start it"),
    (
        "daemon",
        healthy(daemon=replace(healthy().daemon, version="0.0.9")),
        "gpupool is 0.1.0",
        "restart",
    ),
    (
        "models",
        healthy(daemon=replace(healthy().daemon, failed={"m": "it died"})),
        "m has failed: it died",
        "gpupool cache warm m",
    ),
    ("history", healthy(daemon=replace(healthy().daemon, lost_rows=3)), "3 rows", "state_dir"),
    (
        "wsl",
        healthy(kernel=KernelFacts("5.15.153.1-microsoft-standard-WSL2")),
        "Windows limits pinned memory",
        "raise memory.reserve",
    ),
    ("gpu 0", healthy(gpu=gpu(used_bytes=9 * GIB), daemon=NO_DAEMON), "9 GiB", "nvidia-smi"),
    ("gpu 1", healthy(gpu=gpu(is_persistent=False)), "persistence", "nvidia-smi -i 1 -pm 1"),
    (
        "memory",
        healthy(settings=settings(memory={"model_cache": "236GiB"})),
        "little is left",
        "lower",
    ),
    (
        "memory",
        healthy(memory=memory(available_bytes=GIB), daemon=NO_DAEMON),
        "only 1 GiB",
        "stop other programs",
    ),
    (
        "model cache",
        healthy(
            settings=settings(memory={"model_cache": "8GiB"}),
            daemon=replace(healthy().daemon, snapshot_bytes=9 * GIB),
        ),
        "9 GiB of 8 GiB",
        "raise memory.model_cache",
    ),
    ("huge pages", healthy(memory=memory(huge_bytes=GIB)), "1 GiB", "nr_hugepages=0"),
    ("huge pages", healthy(memory=memory(shared_huge_pages="never")), "4 KiB", "shmem_enabled"),
    ("huge pages", healthy(memory=memory(shared_huge_pages="deny")), "4 KiB", "shmem_enabled"),
    ("numa", healthy(numa=NumaFacts(2, True)), "moves pages", "numa_balancing=0"),
    (
        "numa node 1",
        healthy(
            settings=settings(memory={"kv_host": "20GiB"}),
            gpu=gpu(node=1),
            numa=NumaFacts(2, node_bytes={0: 220 * GIB, 1: 36 * GIB}),
        ),
        "2 x 20 GiB of memory.kv_host exceed the 36 GiB",
        "lower memory.kv_host",
    ),
    ("numa", healthy(numa=NumaFacts(2, False, "not permitted")), "far from", "mbind"),
    ("open files", healthy(limits=LimitFacts("x", 4096, None, None)), "may need 5120", "LimitN"),
    ("processes", healthy(limits=LimitFacts("x", None, 100, None)), "at most 100", "LimitNPROC"),
    (
        "locked memory",
        healthy(
            settings=settings(memory={"model_cache": "8GiB", "kv_host": "2GiB"}),
            limits=LimitFacts("x", None, None, 8 << 20),
        ),
        "10 GiB are to be pinned",
        "LimitMEMLOCK=infinity",
    ),
    ("folder state_dir", state_dir(filesystem="tmpfs"), "restarts", "paths.state_dir"),
    ("folder state_dir", state_dir(free_bytes=GIB // 2), "512 MiB free", "free some space"),
    (
        "snapshot files",
        healthy(
            settings=settings(memory={"snapshot_files": "50GiB"}),
            folders=(replace(STATE_DIR, key="snapshots", free_bytes=30 * GIB, num_bytes=GIB),),
        ),
        "room for 31 GiB",
        "lower memory.snapshot_files",
    ),
]


@pytest.mark.parametrize(
    ("name", "facts", "found", "fix"),
    WARNINGS,
    ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WARNINGS)],
)
def test_warnings(name: str, facts: Facts, found: str, fix: str) -> None:
    check = bad(facts)[name]
    assert check.verdict is Verdict.WARNING
    assert found in check.found
    assert fix in check.fix


@pytest.mark.parametrize(
    ("schema", "found"), [(0, "will be created"), (3, "migrates to 5"), (5, "is sound")]
)
def test_databases_that_are_well(schema: int, found: str) -> None:
    facts = healthy(database=database(schema=schema))
    [check] = [one for one in check_all(facts) if one.name == "database"]
    assert (check.verdict, found in check.found) == (Verdict.OK, True)


def test_memory_used_on_a_gpu_is_the_daemons_own_while_it_runs() -> None:
    assert bad(healthy(gpu=gpu(used_bytes=70 * GIB))) == {}


def test_without_a_configuration_the_rest_is_still_looked_at() -> None:
    facts = healthy(
        settings=None, problem="x", fix="y", folders=(), network=None, daemon=NO_DAEMON,
        kernel=KernelFacts("5.0", {"pidfd": "no"}),
    )  # fmt: skip
    assert list(bad(facts)) == ["config", "daemon", "kernel"]


def test_the_budgets_are_shown_with_their_arithmetic() -> None:
    shown = {one.name: one.found for one in check_all(healthy())}
    assert shown["memory.model_cache"].startswith("172GiB: 256 GiB of host memory less: ")
    assert shown["memory.kv_host"].startswith("28GiB: a quarter of what is left, ")
    chosen = {
        one.name: one.found
        for one in check_all(healthy(settings=settings(memory={"kv_host": "3GiB"})))
    }
    assert chosen["memory.kv_host"] == "3GiB: set in the configuration"
