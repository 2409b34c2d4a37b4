"""``gpupool top`` where nobody looks at a terminal, and how it starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gpupool_cli import start
from tests.unit.gpupool_cli import samples
from tests.unit.gpupool_cli.conftest import Cli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def test_one_screen_is_printed(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("q")
    daemon.turns = [samples.turn(1, "q")]
    daemon.tell("q was added")
    for options in ([], ["-1"], ["--once", "--read-only", "--interval", "5s"]):
        result = cli("top", *options)
        assert result.exit_code == 0
        for word in ("1 Devices", "2 Turns", "3 Models", "q was added", "TTFT"):
            assert word in result.stdout
        assert "\x1b" not in result.stdout
    assert cli("top", "--ascii").stdout.isascii()


def test_the_state_as_json(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.add("q")
    state = json.loads(cli("top", "--json").stdout)
    assert [model["usage"]["name"] for model in state["models"]] == ["q"]
    assert state["status"]["state"] == "ready"


def test_a_theme_that_there_is_not(daemon: FakeDaemon, cli: Cli) -> None:
    refused = cli("top", "-1", "--theme", "blue")
    assert refused.exit_code == 2
    assert "no theme is called 'blue'" in refused.stderr
    assert cli("top", "-1", "--theme", "light").exit_code == 0


def test_no_daemon(cli: Cli) -> None:
    result = cli("top")
    assert result.exit_code == 3
    assert "no daemon answers" in result.stderr


@pytest.mark.parametrize("value", ["0", "soon", "-1s"])
def test_an_interval_has_to_be_a_duration(cli: Cli, value: str) -> None:
    assert cli("top", "--interval", value).exit_code == 2


def test_it_starts_without_the_other_commands(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    code = (
        "import sys\n"
        "from gpupool_cli import start\n"
        "sys.argv[1:] = ['top', '-1']\n"
        "try:\n"
        "    start.main()\n"
        "finally:\n"
        "    names = ('gpupool_cli.models', 'gpupool_cli.planning.plan', 'textual')\n"
        "    other = {name for name in names if name in sys.modules}\n"
        "    print(sorted(other), file=sys.stderr)"
    )
    daemon.add("q")
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "3 Models" in result.stdout
    assert result.stderr == "[]\n"


def test_other_commands_start_too(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpupool", "--socket", str(daemon.socket_path), "status"])
    with pytest.raises(SystemExit) as caught:
        start.main()
    assert caught.value.code == 0
