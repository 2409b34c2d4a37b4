"""``gpupool simulate`` needs no daemon: the real command on small boxes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL = ("--devices", "1xH800", "--models", "2", "--duration", "20s")


def simulate(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpupool_cli.main", "simulate", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_one_object_per_line(project_env: dict[str, str]) -> None:
    done = simulate(project_env, *SMALL, "--policy", "gpupool,request-level", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["policy"] for row in rows] == ["gpupool", "request-level"]
    for row in rows:
        assert (row["devices"], row["models"], row["rps"]) == ("1xH800", 2, 0.1)
        assert 0 <= row["attainment"] <= 1


def test_a_table(project_env: dict[str, str]) -> None:
    done = simulate(project_env, *SMALL, "--policy", "gpupool")
    header, row = done.stdout.splitlines()
    assert header.split()[:3] == ["POLICY", "DEVICES", "MODELS"]
    assert row.split()[:3] == ["gpupool", "1xH800", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "0xH800"), "box of devices"),
        (("--devices", "4xTPU"), "TPU"),
        (("--models", "many"), "list of numbers"),
        (("--models", "0"), "at least one"),
        (("--rps", "-1"), "rate"),
        (("--ttft", "0s"), "more than zero"),
        (("--policy", "best"), "no policy"),
    ],
)
def test_what_cannot_be_simulated(
    project_env: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    done = simulate(project_env, *SMALL, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
