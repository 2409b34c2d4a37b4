"""Two ways to call the CLI: in this process and as its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpupool_cli.main import app
from tests.support.programs import run_command

ROOT = Path(__file__).resolve().parents[3]
Cli = Callable[..., Result]
Process = subprocess.CompletedProcess[str]
ProcessCli = Callable[..., Process]


@pytest.fixture
def environment(socket_path: Path) -> dict[str, str]:
    """The environment of a CLI process that finds the daemon by GPUPOOL_SOCKET."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GPUPOOL_")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cli"), str(ROOT / "tui")])
    return kept | {"GPUPOOL_SOCKET": str(socket_path), "PYTHONPATH": paths}


@pytest.fixture
def cli(socket_path: Path) -> Cli:
    """Calls the CLI in this process."""

    def call(*args: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(
            app,
            ["--socket", str(socket_path), *args],
            input=stdin,
            prog_name="gpupool",
            catch_exceptions=False,
        )

    return call


@pytest.fixture
def process_cli(environment: dict[str, str]) -> ProcessCli:
    """Calls the CLI as a process of its own."""

    def call(*args: str, stdin: str | None = None, **variables: str) -> Process:
        if stdin is None and "FORCE_COLOR" not in variables:
            return run_command(args, environment | variables)
        return subprocess.run(
            command(*args),
            input=stdin,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return call


def command(*args: str) -> list[str]:
    """The command line of a CLI process."""
    return [sys.executable, "-m", "gpupool_cli.main", *args]
