"""A command that is forked does what a command that is started does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import child_env
from tests.support.programs import run_command


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list"], ["show", "one", "--json"], ["show", "nothing"]),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (["set", "one"], ["no-command"])),
    ],
    ids=" ".join,
)
def test_a_fork_does_what_a_command_does(sim_box: PrivateDaemon, arguments: list[str]) -> None:
    environment = child_env() | {"GPUPOOL_SOCKET": str(sim_box.socket_path)}
    started = subprocess.run(
        [sys.executable, "-m", "gpupool_cli.main", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = run_command(arguments, environment)
    assert forked.returncode == started.returncode
    assert _without_numbers(forked.stdout) == _without_numbers(started.stdout)
    assert forked.stderr == started.stderr


def _without_numbers(shown: str) -> str:
    """What is shown without rates and histories, which follow the clock."""
    return re.sub(r"null|\d[\d.]*", "0", shown)
