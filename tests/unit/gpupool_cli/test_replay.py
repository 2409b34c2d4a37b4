"""``replay``: what is printed of a log, the exit status, and logs fetched from a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupoold.domain import Targets
from gpupoold.replay.log_file import Header, RecordedCore, lines, write
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import ModelCosts
from gpupoold.sim.policies import make_policy
from tests.unit.gpupool_cli.conftest import Cli, ProcessCli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def recorded_lines() -> list[bytes]:
    core = RecordedCore(Core(make_policy("request-level")))
    core.handle([e.ModelAdded("m", Targets(), 10**10, 10**5, ModelCosts())], 10.0)
    core.handle([e.DeviceUp(0, 80 * 10**9, 2e10), e.Hosted(0, "m")], 10.5)
    core.handle([e.Arrived("r", "m", 12.0, 100)], 12.0)
    return list(lines(Header("request-level"), core.entries()))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    write(path, recorded_lines())
    return path


def test_a_log_that_replays(log: Path, cli: Cli) -> None:
    done = cli("replay", str(log))
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "policy   request-level",
        "begins   with a new core",
        "calls    3 in 2s",
        "events   Arrived 1, DeviceUp 1, Hosted 1, ModelAdded 1",
        "actions  Send 1, StartTurn 1",
        "result   the same actions",
    ]
    document = json.loads(cli("replay", str(log), "--json").stdout)
    assert (document["calls"], document["actions"]) == (3, {"Send": 1, "StartTurn": 1})
    assert document["is_equal"]


def test_a_decision_that_differs_is_shown_with_its_line(log: Path, process_cli: ProcessCli) -> None:
    text = log.read_text()
    log.write_text(text.replace('"type":"Send","request_id":"r"', '"type":"Send","request_id":"q"'))
    done = process_cli("replay", str(log))
    assert done.returncode == 1
    assert "result   other actions" in done.stdout
    assert f"error: {log}, line 4: entry 2 at 12.0 s: recorded [Send(request_id='q'" in done.stderr
    assert "replayed [Send(request_id='r'" in done.stderr


def test_files_that_are_no_logs(tmp_path: Path, log: Path, process_cli: ProcessCli) -> None:
    missing = process_cli("replay", str(tmp_path / "missing"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"{tmp_path}/missing: No such file or directory" in missing.stderr
    assert process_cli("replay", str(tmp_path)).returncode == 2
    log.write_text(log.read_text() + '{"now_s":true}\n')
    done = process_cli("replay", str(log))
    assert done.returncode == 2
    assert f"{log}, line 5: " in done.stderr


def test_a_daemon_s_log_is_recorded_and_replayed(
    tmp_path: Path, daemon: FakeDaemon, cli: Cli
) -> None:
    daemon.event_log = recorded_lines()
    path = tmp_path / "new.jsonl"
    assert "result   the same actions" in cli("replay", "--record", str(path)).stdout
    assert path.read_bytes() == b"".join(daemon.event_log)
    assert list(tmp_path.glob("new*")) == [path]


def test_recording_needs_a_daemon(tmp_path: Path, process_cli: ProcessCli) -> None:
    assert process_cli("replay", "--record", str(tmp_path / "log")).returncode == 3
    assert list(tmp_path.glob("log*")) == []
