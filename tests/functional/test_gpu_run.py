"""``benchmarks/gpu/run.sh`` from beginning to end, with the one piece that needs no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(out: Path, temporary: Path, *options: str) -> subprocess.CompletedProcess[str]:
    temporary.mkdir()
    command = [str(ROOT / "benchmarks/gpu/run.sh"), str(out), *options]
    environment = {"GPUPOOL_PYTHON": sys.executable, "TMPDIR": str(temporary)}
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_dry_run_leaves_results_and_nothing_else(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    done = run(out, temporary, "--dry-run", "--only", "device")
    assert done.returncode == 0, done.stderr
    assert "A dry run" in done.stdout
    found = json.loads((out / "results.json").read_text())
    assert found["is_dry_run"] is True
    assert found["versions"]["torch"]
    outcomes = {name: piece["outcome"] for name, piece in found["pieces"].items()}
    assert outcomes.pop("device") == "done"
    assert set(outcomes.values()) == {"not asked for"}
    figures = found["pieces"]["device"]["figures"]
    assert figures["pinned_in_bytes_per_s"]["measured"] > 0
    assert figures["kv_blocks_outermost_in_line_bytes_per_s"]["measured"] > 0
    assert {file.name for file in out.iterdir()} == {"results.json", "logs.tar.gz"}
    assert list(temporary.iterdir()) == []


def test_an_unknown_piece_is_a_usage_error(tmp_path: Path) -> None:
    done = run(tmp_path / "out", tmp_path / "temporary", "--only", "nothing")
    assert done.returncode == 2
    assert "choose of tests, switch-8B" in done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []
