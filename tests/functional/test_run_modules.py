"""The report of the modules that a completion and an addition run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_modules_of_all_processes_are_counted() -> None:
    """Frontend, daemon and worker are in the list of a completion."""
    run = [sys.executable, "-m", "scripts.run_modules", "--list"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
    completion, _, addition = printed.partition("addition")
    for module in ("frontend/router", "control/requests/dispatcher", "worker/turns/loop"):
        assert f"gpupoold/{module}.py" in completion
    assert "gpupoold/control/models/additions.py" in addition
    counts = re.findall(r"(\d+) modules, +(\d+) of them", printed)
    assert len(counts) == 2
    assert all(int(run) > int(own) > 20 for run, own in counts)
