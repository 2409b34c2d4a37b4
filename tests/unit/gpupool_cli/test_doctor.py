"""``doctor``: its exit status, with and without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "gpupool.toml"
    path.write_text(
        f'devices = ["sim:A10"]\n[server]\nport = 0\n[paths]\nstate_dir = "{tmp_path}/state"\n'
    )
    return str(path)


def test_warnings_alone_are_no_failure(cli: Cli, config: str) -> None:
    result = cli("doctor", "--config", config)
    assert result.exit_code == 0, result.stdout
    assert result.stdout.splitlines()[1].split()[:2] == ["config", "ok"]
    assert "warning: daemon: no daemon answers" in result.stdout
    assert "\nfix: start the daemon with `gpupoold`" in result.stdout


def test_a_fault_is_one(cli: Cli, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[server]\nport = 70000\n")
    result = cli("doctor", "--config", str(wrong), "--json")
    assert result.exit_code == 1
    checks = {one["name"]: one for one in json.loads(result.stdout)["checks"]}
    assert checks["config"]["verdict"] == "fault"
    assert "port" in checks["config"]["found"]
    assert checks["versions"]["verdict"] == "ok"


def test_with_a_daemon(daemon: FakeDaemon, cli: Cli, config: str) -> None:
    result = cli("doctor", "--config", config, "--json")
    assert result.exit_code == 0
    checks = {one["name"]: one for one in json.loads(result.stdout)["checks"]}
    assert "pid 4321 is ready" in checks["daemon"]["found"]
    assert checks["books"]["verdict"] == "ok"
    assert "database" not in checks


def test_folders_and_limits_are_those_that_the_daemon_finds(
    daemon: FakeDaemon, cli: Cli, config: str
) -> None:
    """Its user, its namespace and its control group are not those of the shell."""
    daemon.machine.config_path = config
    result = cli("doctor", "--json")
    checks = {one["name"]: one for one in json.loads(result.stdout)["checks"]}
    assert checks["config"]["found"] == f"{config} is valid"
    assert [name for name in checks if name.startswith("folder ")] == ["folder download_dir"]
    folder = checks["folder download_dir"]
    assert folder["verdict"] == "fault"
    assert "/data/models on ext4" in folder["found"]
    assert "ReadWritePaths=/data/models" in folder["fix"]
    assert "65536 (the daemon)" in checks["open files"]["found"]
    assert "of 1 GiB may be used" in checks["memory"]["found"]
    assert daemon.machine.config_path in checks["config"]["found"]


def test_another_configuration_is_judged_from_here(
    daemon: FakeDaemon, cli: Cli, config: str
) -> None:
    checks = json.loads(cli("doctor", "--config", config, "--json").stdout)["checks"]
    found = {one["name"]: one["found"] for one in checks}
    assert "/data/models" not in found["folder download_dir"]
