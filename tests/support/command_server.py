"""A process that has imported the command line, and forks for each command of a test.

An interpreter that starts and imports every command takes most of a second of a core; a fork takes
milliseconds. A command is a process of its own, with its own arguments, environment and output, as
if it was run by a shell. ``tests/functional/test_command_server.py`` compares the two.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

_MAX_BYTES = 100_000


class _Order(msgspec.Struct):
    arguments: list[str]
    environment: dict[str, str]
    folder: str


_decoder = msgspec.json.Decoder(_Order)


class Command:
    """A command that runs, ``gpupool`` with these arguments.

    What is read when a module is imported, such as ``FORCE_COLOR``, has no effect.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> None:
        """``fds`` are the standard input, output and error output; the caller keeps them."""
        order = msgspec.json.encode(_Order(list(arguments), dict(environment), os.getcwd()))
        self._arguments = list(arguments)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(_server())
        socket.send_fds(self._server, [order], fds)
        self._pid = int(self._server.recv(100))

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the exit status; a negative number is a signal.

        Raises:
            subprocess.TimeoutExpired: the command took too long, and was killed.
        """
        with self._server as server:
            server.settimeout(timeout_s)
            try:
                status = server.recv(100)
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self._arguments, timeout_s) from None
        return int(status) if status else -signal.SIGKILL


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a :class:`Command` with nothing on its standard input.

    Raises:
        subprocess.TimeoutExpired: see :meth:`Command.wait`; with the output.
    """
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        command = Command(arguments, environment, [one.fileno() for one in (stdin, stdout, stderr)])
        try:
            status = command.wait(timeout_s)
        except subprocess.TimeoutExpired as late:
            late.output = _text(stdout)
            raise
        said = ["gpupool", *arguments]
        return subprocess.CompletedProcess(said, status, _text(stdout), _text(stderr))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def _server() -> str:
    """Start the server, which ends with this process; return its address."""
    folder = tempfile.TemporaryDirectory(prefix="gpupool-commands-")
    address = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.command_server", str(listener.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(listener.fileno(),),
            stdin=subprocess.PIPE,
        )

    def stop() -> None:
        process.communicate()  # closes its standard input
        folder.cleanup()

    atexit.register(stop)
    return address


# In the server


def main(listener_fd: int) -> None:
    """Fork for each command until the other end of the standard input is closed."""
    from typer.main import get_command

    from gpupool_cli.main import app

    root: Any = get_command(app)
    list(root.commands.values())  # imports every command
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    listener = socket.socket(fileno=listener_fd)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        with client:
            text, fds, _, _ = socket.recv_fds(client, _MAX_BYTES, 3)
            if os.fork() == 0:
                listener.close()
                _become(_decoder.decode(text), fds, client)
        for fd in fds:
            os.close(fd)


def _become(order: _Order, fds: Sequence[int], client: socket.socket) -> NoReturn:
    """Run the command; tell the client its process id and, at the end, its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.send(str(os.getpid()).encode())
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # a terminal cannot seek
        of = getattr(sys, name)
        buffering = 1 if name == "stderr" else -1
        stream = open(number, of.mode, buffering, of.encoding, of.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    status = _status_of(order.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    client.send(str(status).encode())
    os._exit(status)


def _status_of(arguments: Sequence[str]) -> int:
    """Run the command as ``python -m gpupool_cli.main``; return its exit status."""
    import gpupool_cli.main as cli

    sys.argv = [str(Path(cli.__file__)), *arguments]
    try:
        cli.main()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
