"""``gpupool`` and ``gpupoold`` as processes of their own, forked from one that has imported them.

``tests/functional/test_programs.py`` compares forks with processes that are started.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, Any

from tests.support.forks import ForkedProcess, ForkOrder, lasting_fork_server, loading, serve

_COMMAND = "gpupool_cli.main"
_DAEMON = "gpupoold"


def start_command(
    arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> ForkedProcess:
    """Run ``gpupool`` with these arguments.

    ``fds`` are the standard input, output and error output; the caller keeps them. What is read
    when a module is imported, such as ``FORCE_COLOR``, has no effect.
    """
    return _forked(_COMMAND, arguments, environment, fds)


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``gpupool`` as ``start_command`` does, with nothing on its standard input.

    Raises:
        subprocess.TimeoutExpired: the command took too long, and was killed.
    """
    return _run(_COMMAND, arguments, environment, timeout_s)


def run_daemon(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``gpupoold`` as ``run_command`` runs ``gpupool``: a daemon that ends by itself."""
    return _run(_DAEMON, arguments, environment, timeout_s)


def start_daemon(
    arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> ForkedProcess:
    """Run ``gpupoold`` with these arguments, as :data:`benchmarks.private_daemon.Start` says."""
    with open(os.devnull) as stdin:
        fds = [stdin.fileno(), log.fileno(), log.fileno()]
        return _forked(_DAEMON, arguments, environment, fds)


def _run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        fds = [one.fileno() for one in (stdin, stdout, stderr)]
        process = _forked(module, arguments, environment, fds)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, _text(stdout)) from None
        return subprocess.CompletedProcess(arguments, status, _text(stdout), _text(stderr))


def _forked(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
) -> ForkedProcess:
    order = ForkOrder(module, list(arguments), dict(environment), os.getcwd())
    return ForkedProcess(_server(module), order, fds)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def _server(module: str) -> str:
    return lasting_fork_server(["tests.support.programs", module])


def main(module: str, listener_fd: int) -> None:
    """Import the program, then fork until the parent ends."""
    with loading():
        _LOAD[module]()
    serve(listener_fd)


def _load_command() -> None:
    from typer.main import get_command

    from gpupool_cli.main import app

    root: Any = get_command(app)
    list(root.commands.values())  # imports every command
    importlib.import_module("httpcore")  # by a client's first connection


def _load_daemon() -> None:
    importlib.import_module("gpupoold.service")


_LOAD = {_COMMAND: _load_command, _DAEMON: _load_daemon}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
