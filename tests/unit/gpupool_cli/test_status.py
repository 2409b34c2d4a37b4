"""``status``, ``ps`` and ``version``."""

from __future__ import annotations

import json

import pytest

from gpupool_cli.status import loading_text
from gpupoold import __version__
from gpupoold.api.schemas import AdditionInfo, GpuInfo, LoadingInfo, Ps, Status
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

GIB = 2**30


def test_status_of_a_ready_daemon(daemon: FakeDaemon, cli: Cli) -> None:
    result = cli("status")
    assert result.exit_code == 0
    assert "state          ready\n" in result.stdout
    assert f"http           {daemon.http_url}\n" in result.stdout
    assert "model cache    15 GiB of 64 GiB\n" in result.stdout
    assert Status.model_validate_json(cli("status", "--json").stdout).pid == 4321


@pytest.mark.parametrize("state", ["starting", "stopping"])
def test_status_of_a_daemon_that_is_not_ready(daemon: FakeDaemon, cli: Cli, state: str) -> None:
    daemon.state = state
    result = cli("status")
    assert result.exit_code == 1
    assert state in result.stdout


@pytest.mark.parametrize("args", [["status"], ["status", "--json"], ["list"], ["ps"]])
def test_no_daemon(process_cli: ProcessCli, args: list[str]) -> None:
    result = process_cli(*args)
    assert (result.returncode, result.stdout) == (3, "")
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: no daemon answers at ")
    assert hint.startswith("hint: start the daemon with `gpupoold` or `systemctl start gpupoold`")


def test_ps_shows_devices_and_models(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("a")
    daemon.add("b")
    lines = cli("ps").stdout.splitlines()
    assert [line.split() for line in lines] == [
        "DEVICE KIND STATE ROLE LIVE PID MEMORY FREE HOST-KV ENGINES ON-TURN QUOTA STEPS".split(),
        "0 cuda ready mixed (auto) 0 4400 80 GiB 20 GiB - 2, 3 GiB of 4 GiB a 500ms 1234".split(),
        [],
        [
            *"NAME STATE DEVICES LIVE WAIT REFUSED RESIDENT CACHED KV".split(),
            *"PAUSED TTFT-p99 TBT-p99 SLO%".split(),
        ],
        "a ready 0 2 1 3 15 GiB 15 GiB 1 GiB 1 GiB 1.25s 80ms 97.5".split(),
        "b ready 0 2 1 0 15 GiB 15 GiB 1 GiB 1 GiB - - -".split(),
    ]
    assert Ps.model_validate_json(cli("ps", "--json").stdout).num_switches == 3


def test_ps_shows_the_gpus_of_a_group(daemon: FakeDaemon, cli: Cli) -> None:
    gpus = [
        GpuInfo(gpu=4, memory_bytes=40 * GIB, free_bytes=10 * GIB),
        GpuInfo(
            gpu=5,
            memory_bytes=40 * GIB,
            free_bytes=10 * GIB,
            utilisation=0.93,
            temperature_c=61.0,
            power_w=402.4,
            used_bytes=42 * GIB,
        ),
    ]
    daemon.device["gpus"] = gpus
    lines = [line.split() for line in cli("ps").stdout.splitlines()]
    assert lines[1][:4] == ["0", "cuda", "x2", "ready"]
    assert lines[3:6] == [
        "DEVICE GPU MEMORY FREE ALL-USE BUSY TEMP POWER".split(),
        "0 4 40 GiB 10 GiB - - - -".split(),
        "0 5 40 GiB 10 GiB 42 GiB 93 % 61 C 402 W".split(),
    ]


def test_a_load_is_told_in_words() -> None:
    load = LoadingInfo(model="q", stage="times steps", since_s=3.24)
    text = "device 1: loading q for 3.24s beside the turns: the worker times steps"
    assert loading_text(1, load) == text
    assert loading_text(1, load.model_copy(update={"num_waiting": 2})) == f"{text}; 2 more to load"


def test_ps_shows_what_is_being_added(daemon: FakeDaemon, cli: Cli) -> None:
    step = AdditionInfo(name="r", stage="check")
    download = {"done_bytes": 2**30, "total_bytes": 2**32, "bytes_per_s": 2.0**26}
    changes = {"name": "q", "stage": "download", **download}
    daemon.additions = [step.model_copy(update=changes), step]
    assert cli("ps").stdout.splitlines()[-4:] == [
        "",
        "ADDING  STAGE     PROGRESS",
        "q       download  1 GiB of 4 GiB, 25 %, 64 MiB/s, 48s left",
        "r       check     -",
    ]


def test_version_with_and_without_a_daemon(daemon: FakeDaemon, cli: Cli) -> None:
    assert json.loads(cli("version", "--json").stdout) == {
        "gpupool": __version__,
        "gpupoold": "0.1.0",
        "engine": "0.32.0",
    }
    assert cli("version").stdout.splitlines()[-1] == "engine    0.32.0"


def test_version_needs_no_daemon(cli: Cli) -> None:
    result = cli("version")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"gpupool   {__version__}\n".replace("   ", "  ")
    assert json.loads(cli("version", "--json").stdout)["gpupoold"] is None
