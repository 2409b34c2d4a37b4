"""Ctrl-C while a command is loaded, at any of its imports, as later."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Interrupts the process at the import of a module, as Ctrl-C may.
PROGRAM = """
import os, signal, sys

class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv[-1]
sys.meta_path.insert(0, Interrupting)
from gpupool_cli.start import main
main()
sys.exit("was not interrupted")
"""


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("list", "typer"),
        ("list", "gpupool_cli.main"),
        ("simulate", "gpupool_cli.planning.simulate"),
        ("simulate", "pydantic"),
        ("events", "httpx"),
        ("top", "gpupool_cli.top"),
    ],
)
def test_an_interrupted_import(command: str, module: str, project_env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, module],
        env=project_env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("gpupoold.__main__", "uvicorn"),
        ("gpupoold.__main__", "gpupoold.admin.app"),
        ("examples.demo.__main__", "rich.console"),
        ("examples.demo.__main__", "examples.demo.act_two"),
    ],
)
def test_an_interrupted_start(program: str, module: str, project_env: dict[str, str]) -> None:
    text = PROGRAM.replace("gpupool_cli.start", program)
    done = subprocess.run(
        [sys.executable, "-c", text, module],
        env=project_env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


def test_an_interrupted_command(project_env: dict[str, str]) -> None:
    program = (
        "import sys; import gpupool_cli.main as every\n"
        "from gpupool_cli.start import main\n"
        "def interrupted(): raise KeyboardInterrupt\n"
        "every.main = interrupted; sys.argv = ['gpupool', 'list']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=project_env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (130, "")
