"""What the doctor finds on this machine and in synthetic files."""

from __future__ import annotations

import resource
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpupool_state.db import MIGRATIONS
from gpupoold.config.schema import parse_settings
from gpupoold.doctor import probe_gpu, probes
from gpupoold.doctor.facts import DaemonFacts, Gpu, GpuFacts
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_host import folder_facts, limit_facts, memory_facts

GIB = 2**30
GONE = DaemonFacts(problem="not there")


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class TestMemory:
    def test_of_this_machine(self) -> None:
        facts = memory_facts()
        assert 0 < facts.available_bytes <= facts.total_bytes
        assert facts.overcommit in (0, 1, 2)

    def test_of_synthetic_files(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            proc__meminfo="HugePages_Free:       512\nHugepagesize:       2048 kB\n"
            "ShmemHugePages:    4096 kB\n",
            proc__sys__vm__overcommit_memory="2\n",
            sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size [advise]\n",
        )
        facts = memory_facts(tmp_path)
        assert (facts.huge_bytes, facts.overcommit) == (GIB, 2)
        assert (facts.shared_huge_pages, facts.shared_huge_bytes) == ("advise", 4 << 20)
        assert facts.limit_bytes is None

    def test_the_limit_is_that_of_the_named_process(self, tmp_path: Path) -> None:
        write(tmp_path, proc__17__cgroup="0::/daemon\n", proc__self__cgroup="0::/shell\n")
        write(tmp_path, sys__fs__cgroup__daemon__memory="")
        for name, limit in (("daemon", "4096"), ("shell", "8192")):
            write(tmp_path, **{f"sys__fs__cgroup__{name}__memory.max": limit})
        assert memory_facts(tmp_path).limit_bytes == 8192
        assert memory_facts(tmp_path, pid=17).limit_bytes == 4096


class Nvml:
    """As much of ``pynvml`` as is asked for: one GPU without MIG."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 0

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.problem:
            raise self.NVMLError(self.problem)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetMigMode(self, handle: object) -> Any:
        raise self.NVMLError("Not Supported")

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlSystemGetCudaDriverVersion_v2": 13010,
            "nvmlSystemGetDriverVersion": "580.65",
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetName": "H100",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=GIB),
            "nvmlDeviceGetPersistenceMode": 0,
            "nvmlDeviceGetDisplayActive": 0,
            "nvmlDeviceGetDisplayMode": 1,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:FF:1F.0"),
        }
        return lambda *_: answers[name]


class TestGpu:
    def test_what_nvml_tells(self) -> None:
        nvml = Nvml()
        gpu = Gpu(
            "H100", 80 * GIB, GIB, is_mig=False, is_persistent=False, uuid="GPU-1", has_display=True
        )
        assert gpu_facts(nvml) == GpuFacts("", "580.65", (13, 1), (gpu,))
        assert not nvml.is_open

    @pytest.mark.parametrize(
        ("library", "has_none"), [("libnone.so.1", True), ("libc.so.6", False)]
    )
    def test_no_driver(self, library: str, has_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe_gpu, "_CUDA_DRIVER", library)
        expected = GpuFacts("Library Not Found", has_none=has_none)
        assert gpu_facts(Nvml("Library Not Found")) == expected


def make_database(path: Path, schema: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE models (name TEXT PRIMARY KEY)")
        connection.execute("CREATE TABLE schema_migrations (number INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO schema_migrations VALUES (?)", (schema,))


class TestDatabase:
    def test_none_yet(self, tmp_path: Path) -> None:
        facts = probes.database_facts(tmp_path / "gpupool.db")
        assert (facts.schema, facts.newest_schema, facts.problem) == (0, MIGRATIONS[-1].number, "")

    def test_an_older_one_is_left_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "gpupool.db"
        make_database(path, 3)
        before = path.read_bytes()
        assert probes.database_facts(path).schema == 3
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_what_is_only_in_its_log_counts(self, tmp_path: Path) -> None:
        path = tmp_path / "gpupool.db"
        make_database(path, 3)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("INSERT INTO schema_migrations VALUES (9)")
            connection.commit()
            assert probes.database_facts(path).schema == 9

    @pytest.mark.parametrize("keep", [100, 5000])
    def test_a_damaged_one(self, tmp_path: Path, keep: int) -> None:
        path = tmp_path / "gpupool.db"
        make_database(path, 4)
        path.write_bytes(path.read_bytes()[:keep] + b"nonsense" * 1000)
        assert probes.database_facts(path).problem

    def test_something_else(self, tmp_path: Path) -> None:
        path = tmp_path / "gpupool.db"
        path.write_text("hello " * 1000)
        assert "not a database" in probes.database_facts(path).problem
        path.unlink()
        path.mkdir()
        assert probes.database_facts(path).problem


class TestFolders:
    def test_missing_ones_are_judged_by_where_they_would_be_made(self, tmp_path: Path) -> None:
        settings = parse_settings(
            {
                "paths": {"state_dir": str(tmp_path / "a/b"), "log_dir": str(tmp_path)},
                "memory": {"snapshot_files": "1GiB"},
            },
            "test",
        )
        facts = {one.key: one for one in folder_facts(settings)}
        assert list(facts) == ["state_dir", "log_dir", "download_dir", "runtime_dir", "snapshots"]
        assert (facts["state_dir"].exists, facts["log_dir"].exists) == (False, True)
        assert facts["state_dir"].is_writable
        assert facts["state_dir"].free_bytes > 0
        assert facts["state_dir"].filesystem not in ("", "unknown")

    def test_snapshots_that_are_there(self, tmp_path: Path) -> None:
        (tmp_path / "snapshots").mkdir()
        (tmp_path / "snapshots" / "one").write_bytes(b"x" * 1000)
        settings = parse_settings(
            {"paths": {"state_dir": str(tmp_path)}, "memory": {"snapshot_files": "1GiB"}}, "test"
        )
        assert folder_facts(settings)[-1].num_bytes == 1000


class TestNetwork:
    def test_a_port_that_somebody_has(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            settings = parse_settings({"server": {"port": port}}, "test")
            facts = probes.network_facts(settings, tmp_path, GONE)
            assert facts.problem == "Address already in use"
            assert facts.address == f"127.0.0.1:{port}"
            # It is the daemon's own while that runs.
            assert probes.network_facts(settings, tmp_path, DaemonFacts()).problem == ""
        assert probes.network_facts(settings, tmp_path, GONE).problem == ""


def test_this_machine_can_do_what_its_tests_do() -> None:
    assert probes.kernel_facts().missing == {}
    assert probes.numa_facts().num_nodes >= 0


def test_limits_are_those_of_the_daemon_or_ones_own() -> None:
    own = limit_facts(None)
    assert own.of == "this shell"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert own.open_files == soft
    assert limit_facts(1 << 22).of == "this shell", "there is no such process"


def test_the_admin_socket_is_where_the_configuration_says(tmp_path: Path) -> None:
    config = tmp_path / "gpupool.toml"
    config.write_text(f'devices = ["sim:A10"]\n[paths]\nruntime_dir = "{tmp_path}"\n')
    facts = probes.find_facts(config, None)
    assert facts.network is not None
    assert facts.network.socket_path == tmp_path / "admin.sock"
    assert str(tmp_path) in facts.daemon.problem


def test_all_facts_without_a_daemon_and_with_a_wrong_configuration(tmp_path: Path) -> None:
    wrong = tmp_path / "gpupool.toml"
    wrong.write_text("[server]\nprot = 1\n")
    facts = probes.find_facts(wrong, tmp_path / "admin.sock")
    assert facts.settings is None
    assert "prot" in facts.problem
    assert facts.fix
    assert not facts.daemon.is_running
    assert facts.daemon.fix
