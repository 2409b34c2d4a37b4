"""What scripts rely on: exit codes, stdout against stderr, plain text, light start-up."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from fastapi.responses import JSONResponse

from gpupool_cli.diagnostics import ExitCode
from gpupoold.errors import ALL_ERRORS
from tests.unit.gpupool_cli.conftest import ROOT, Cli, ProcessCli, command
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon
from tests.unit.gpupool_cli.terminal import shown_on_terminal


def _on_a_terminal(args: list[str], environment: dict[str, str]) -> str:
    """What a terminal shows of a CLI process: stdout and stderr together."""
    variables = {"COLUMNS": "120", "TERM": "xterm-256color"} | environment
    status, shown = shown_on_terminal(variables, *args)
    assert status == 0
    return shown


def test_every_error_has_an_exit_code() -> None:
    assert {kind.exit_code for kind in ALL_ERRORS} <= set(ExitCode)


def test_a_fresh_process_loads_nothing_heavy() -> None:
    code = (
        "import sys, gpupool_cli.main, typer.main\n"
        "list(typer.main.get_command(gpupool_cli.main.app).commands.values())\n"
        "heavy = {'torch', 'vllm', 'textual', 'transformers', 'fastapi', 'numpy', 'ray'}\n"
        "print(sorted(heavy & set(sys.modules)), len(sys.modules))"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    heavy, _, num_modules = result.stdout.rpartition(" ")
    assert heavy == "[]"
    # Start-up takes about 1.3 ms a module; the time itself depends on what else runs here.
    assert int(num_modules) < 850


def test_a_command_loads_no_other_commands() -> None:
    code = (
        "import sys, gpupool_cli.main\n"
        "sys.argv = ['gpupool', 'version', '--help']\n"
        "try:\n"
        "    gpupool_cli.main.main()\n"
        "finally:\n"
        "    others = ('gpupool_cli.models', 'gpupool_cli.planning', 'gpupoold.sim.engine')\n"
        "    print(sorted(set(others) & set(sys.modules)))"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.endswith("\n[]\n")


def test_the_client_alone_is_light_too() -> None:
    code = (
        "import sys, gpupoold.api.client\n"
        "heavy = {'torch', 'vllm', 'textual', 'fastapi', 'typer', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == "[]\n"


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^Exit status: .*$", text, re.MULTILINE)
    assert {int(code) for code in re.findall(r"\d+", shown)} == {*map(int, ExitCode)}


@pytest.mark.parametrize(
    "args", [["--bogus"], ["bogus"], ["list", "--bogus"], ["show"], ["add-model", "a", "b"], []]
)
def test_usage_errors(process_cli: ProcessCli, args: list[str]) -> None:
    result = process_cli(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: " if args else "Usage: gpupool")


def test_help_goes_to_stdout(process_cli: ProcessCli) -> None:
    for args in (["--help"], ["-h"], ["rm", "-h"]):
        result = process_cli(*args)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith("Usage: gpupool")


def test_a_broken_pipe_is_quiet(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    for number in range(5000):
        daemon.add(f"model-{number}")
    process = subprocess.Popen(
        command("list"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    with process:
        assert process.stderr.read() == b""
        assert process.wait(20) == 0


def test_tables_on_a_terminal_are_drawn(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    daemon.add("qwen-7b")
    shown = _on_a_terminal(["list"], environment | {"NO_COLOR": ""})
    assert "qwen-7b" in shown
    assert "─" in shown
    assert "\x1b[" in shown


def test_a_table_wider_than_the_terminal_loses_nothing(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    daemon.add("a-rather-long-name-of-a-model", aliases=("its-alias",))
    shown = _on_a_terminal(["list"], environment | {"COLUMNS": "30"})
    assert "a-rather-long-name-of-a-model" in shown
    assert "its-alias" in shown


def test_no_color_is_respected(daemon: FakeDaemon, environment: dict[str, str]) -> None:
    daemon.add("qwen-7b")
    daemon.tell("broke", level="error")
    for verb in ("list", "events"):
        shown = _on_a_terminal([verb], environment | {"NO_COLOR": "1"})
        assert "\x1b[3" not in shown


def test_progress_on_a_terminal_shows_downloaded_bytes(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    daemon.download_pause_s = 0.3
    shown = _on_a_terminal(["add-model", "q"], environment)
    assert "q: downloading" in shown
    assert "5.0/15.0 GiB" in shown
    assert "64 MiB/s, 2.67m left" in shown
    assert "q: ready, 15 GiB of weights" in shown


def test_output_elsewhere_has_no_boxes_and_no_colours(
    daemon: FakeDaemon, environment: dict[str, str]
) -> None:
    daemon.add("qwen-7b")
    daemon.tell("broke", level="error")
    verbs = ("list", "ps", "switches", "events", "status", "version")
    code = (
        "import sys, gpupool_cli.main\n"
        "for verb in sys.argv[1:]:\n"
        "    sys.argv = ['gpupool', verb]\n"
        "    try:\n"
        "        gpupool_cli.main.main()\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, verb\n"
        "print('ended')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *verbs],
        env=environment | {"FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "qwen-7b" in result.stdout
    assert result.stdout.endswith("\nended\n")
    assert result.stdout.isascii()
    assert "\x1b" not in result.stdout


def test_the_socket_option_wins_over_the_environment(
    daemon: FakeDaemon, process_cli: ProcessCli
) -> None:
    result = process_cli(
        "--socket", str(daemon.socket_path), "status", GPUPOOL_SOCKET="/nonexistent"
    )
    assert result.returncode == 0


def test_an_answer_of_another_version_is_explained(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.raw_answer = JSONResponse({"state": "ready"})
    result = cli("status")
    assert result.exit_code == 1
    assert "GET /status is not understood: version: Field required" in result.stderr
    assert "versions" in result.stderr
