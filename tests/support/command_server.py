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


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``gpupool`` with these arguments, and nothing on its standard input.

    What is read when a module is imported, such as ``FORCE_COLOR``, has no effect.

    Raises:
        subprocess.TimeoutExpired: the command took too long, and was killed.
    """
    order = msgspec.json.encode(_Order(list(arguments), dict(environment), os.getcwd()))
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        server.settimeout(timeout_s)
        server.connect(_server())
        socket.send_fds(server, [order], [one.fileno() for one in (stdin, stdout, stderr)])
        pid = int(server.recv(100))
        try:
            status = server.recv(100)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, timeout_s, _text(stdout)) from None
        returncode = int(status) if status else -signal.SIGKILL
        command = ["gpupool", *arguments]
        return subprocess.CompletedProcess(command, returncode, _text(stdout), _text(stderr))


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
