"""Shell completion: the scripts, and model names from the registry."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.unit.gpupool_cli.conftest import Cli, ProcessCli
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


def _complete(process_cli: ProcessCli, *words: str) -> list[str]:
    result = process_cli(
        COMP_WORDS="\n".join(["gpupool", *words]),
        COMP_CWORD=str(len(words)),
        _GPUPOOL_COMPLETE="complete_bash",
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_per_shell(process_cli: ProcessCli, shell: str) -> None:
    result = process_cli("completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"_GPUPOOL_COMPLETE=complete_{shell}" in result.stdout


def test_the_bash_script_is_valid(process_cli: ProcessCli) -> None:
    script = process_cli("completion", "bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)


def test_other_shells_are_a_usage_error(cli: Cli) -> None:
    result = cli("completion", "tcsh")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    "verb", ["show", "set", "rm", "run", "cache pin", "cache unpin", "cache drop", "cache warm"]
)
def test_names_are_completed(daemon: FakeDaemon, process_cli: ProcessCli, verb: str) -> None:
    for name in ("qwen-7b", "qwen-14b", "llama"):
        daemon.add(name)
    assert _complete(process_cli, *verb.split(), "qw") == ["qwen-7b", "qwen-14b"]


def test_names_are_completed_from_the_socket_on_the_line(
    daemon: FakeDaemon, process_cli: ProcessCli
) -> None:
    daemon.add("llama")
    result = process_cli(
        GPUPOOL_SOCKET="/nonexistent/admin.sock",
        COMP_WORDS=f"gpupool --socket {daemon.socket_path} show l",
        COMP_CWORD="4",
        _GPUPOOL_COMPLETE="complete_bash",
    )
    assert result.stdout.split() == ["llama"]


def test_without_a_daemon_completion_is_silent(process_cli: ProcessCli) -> None:
    assert _complete(process_cli, "show", "") == []


def test_a_daemon_that_hangs_does_not_hang_the_shell(
    daemon: FakeDaemon, process_cli: ProcessCli
) -> None:
    daemon.delay_s = 60.0
    started = time.monotonic()
    assert _complete(process_cli, "show", "") == []
    assert time.monotonic() - started < 30.0


def test_commands_are_completed(process_cli: ProcessCli) -> None:
    assert _complete(process_cli, "s") == ["show", "set", "status", "switches", "simulate"]
