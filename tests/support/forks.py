"""Processes of tests that are forked from a process that has imported their modules.

An interpreter that starts and imports the command line or the daemon takes a second of a core, the
import of vLLM nine; a fork takes milliseconds. A fork has its own arguments, environment, folder,
output and descriptors, and ends when the process that asked for the fork ends or leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from gpupoold.system.process import die_with_parent, importing, show_as

_MAX_BYTES = 100_000
_MAX_FDS = 16


class ForkOrder(msgspec.Struct):
    """Module, command line, environment and working folder of a fork.

    The descriptors that come with the order are the three standard ones, and those that
    ``fd_options`` of the command line name.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fd_options: list[str] = []


def import_path(order: ForkOrder) -> list[str]:
    """Return the folders that the environment of a fork puts on its import path."""
    return list(filter(None, order.environment.get("PYTHONPATH", "").split(os.pathsep)))


_decoder = msgspec.json.Decoder(ForkOrder)


class ForkedProcess:
    """A fork, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, address: str, order: ForkOrder, fds: Sequence[int]) -> None:
        """Fork.

        Raises:
            OSError: the server has ended, or its reason for no fork.
        """
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reading = threading.Lock()
        self._server.connect(address)
        socket.send_fds(self._server, [msgspec.json.encode(order)], fds)
        answer = self._server.recv(_MAX_BYTES).decode()
        if not answer.isdecimal():
            raise OSError(answer or "the server has ended")
        self.pid = int(answer)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        with self._reading:
            if self.returncode is None and select.select([self._server], [], [], 0)[0]:
                self.returncode = int(self._server.recv(100) or -signal.SIGKILL)
                self._server.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process runs longer.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with contextlib.suppress(ValueError, OSError):  # another thread has the status
                select.select([self._server], [], [], left_s)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def fork_server(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Run ``python -m WORDS FD``, which calls :func:`serve`; yield its address.

    ``environment`` is added to that of this process; the import path is this process's. The server
    ends with the context, and with this process.
    """
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix="gpupool-forks-") as folder:
        address = f"{folder}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener, Path(folder, "log").open("wb") as log:
            listener.bind(address)
            listener.listen(64)
            process = subprocess.Popen(
                [sys.executable, "-m", *words, str(listener.fileno())],
                env={**os.environ, "PYTHONPATH": path, **environment},
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        try:
            yield address
        finally:
            process.communicate()  # closes its standard input


def lasting_fork_server(words: Sequence[str]) -> str:
    """Run such a server until this process ends; return its address."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(fork_server(words, {}))


# In the server


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Prepare a fork server; the context imports the modules of its forks."""
    # The memory of the title is found at the first call, behind a whole environment.
    show_as("tests.support.forks", [])
    with importing():
        yield


def serve(listener_fd: int, refusal: Callable[[ForkOrder], str] = lambda _: "") -> None:
    """Fork until the other end of the standard input is closed.

    ``refusal`` returns why there is no fork for an order, or nothing.
    """
    _Server(socket.socket(fileno=listener_fd), refusal).serve()


@dataclass(slots=True)
class _Fork:
    client: socket.socket
    pid: int


class _Server:
    """Forks, passes on ends, and ends the forks of clients that have ended."""

    def __init__(self, listener: socket.socket, refusal: Callable[[ForkOrder], str]) -> None:
        self._listener = listener
        self._refusal = refusal
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(sys.stdin, select.POLLIN)
        self._by_client: dict[int, _Fork] = {}
        self._by_process: dict[int, _Fork] = {}

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == sys.stdin.fileno():
                    return
                if fd == self._listener.fileno():
                    self._take(self._listener.accept()[0])
                elif (fork := self._by_client.pop(fd, None)) is not None:
                    self._poll.unregister(fd)
                    os.kill(fork.pid, signal.SIGKILL)  # the client has ended
                elif (fork := self._by_process.pop(fd, None)) is not None:
                    self._poll.unregister(fd)
                    os.close(fd)
                    self._ended(fork)

    def _ended(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            fork.client.send(str(os.waitstatus_to_exitcode(status)).encode())
        if self._by_client.pop(fork.client.fileno(), None) is not None:
            self._poll.unregister(fork.client.fileno())
        fork.client.close()

    def _take(self, client: socket.socket) -> None:
        text, fds, _, _ = socket.recv_fds(client, _MAX_BYTES, _MAX_FDS)
        order = _decoder.decode(text)
        if reason := self._refusal(order):
            client.send(reason.encode())
            client.close()
        elif (pid := os.fork()) == 0:
            _become(order, fds)
        else:
            fork = _Fork(client, pid)
            pidfd = os.pidfd_open(pid)
            self._by_client[client.fileno()] = self._by_process[pidfd] = fork
            for watched in (client.fileno(), pidfd):
                self._poll.register(watched, select.POLLIN)
            client.send(str(pid).encode())
        for fd in fds:
            os.close(fd)


def _become(order: ForkOrder, fds: Sequence[int]) -> None:
    """Run as the process that was to be; does not return."""
    status = 1
    try:
        die_with_parent()
        standard, passed = fds[:3], fds[3:]
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        bounds = [2, *sorted(passed), 4096]
        for below, above in itertools.pairwise(bounds):
            os.closerange(below + 1, above)
        _open_streams()
        arguments = order.arguments
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        sys.path[:0] = [folder for folder in import_path(order) if folder not in sys.path]
        values = dict(zip(order.fd_options, passed, strict=True))
        for option, value in {**values, "--parent-pid": os.getppid()}.items():
            if option in arguments:
                arguments[arguments.index(option) + 1] = str(value)
        random.seed()  # otherwise all forks would draw equal numbers
        show_as(order.module, arguments)
        module = _main_module(order.module)
        sys.argv = [str(module.__file__), *arguments]
        module.main()
        status = 0
    except SystemExit as leaving:
        status = _status_of(leaving)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _open_streams() -> None:
    """Open the standard streams anew, as an interpreter does: a terminal cannot seek."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        of = getattr(sys, name)
        buffering = 1 if name == "stderr" else -1
        stream = open(number, of.mode, buffering, of.encoding, of.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _status_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def _main_module(name: str) -> ModuleType:
    found = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__") if hasattr(found, "__path__") else found
