"""A process that has imported vLLM, and forks the fork servers of the tests' daemons.

Every daemon's fork server imports vLLM, nine seconds of a core; the functional tests start about
eighty daemons. ``imported/sitecustomize.py`` is on the path of these daemons: a fork server that
begins asks for a fork of this process, with its own descriptors, arguments and environment, and
stays as a proxy that ends with the fork and the fork with it. A fork server whose environment may
change what vLLM does at its import gets no fork, and imports.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpupoold.system.process import die_with_parent, raise_file_limit, show_as

ADDRESS = "GPUPOOL_TEST_IMPORT_SERVER"
PROXY = "proxy of process"
_MODULE = "gpupoold.system.fork_server"
_MAX_BYTES = 100_000
# What vLLM does not read at its import; the import path is compared by itself.
# The last three are set by frontends and workers, each to another value, and for simulated devices
# to the value that the CPU build has anyway.
_MAY_DIFFER = (
    *("PYTEST_", "GPUPOOL_", "PYTHONPATH", "PWD"),
    *("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_TARGET_DEVICE"),
)
# Of emulated devices alone; others do no harm by it.
_MAY_BE_ABSENT = "GLIBC_TUNABLES"
_PRELOADED = ["gpupoold.frontend.preload", "gpupoold.worker.preload"]
_LOG_LEVEL = "info"


class ForkOrder(msgspec.Struct):
    """Command line, environment and working folder of a fork."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


_decoder = msgspec.json.Decoder(ForkOrder)


@contextlib.contextmanager
def import_server(environment: Mapping[str, str]) -> Iterator[str]:
    """Run an import server; yield its address.

    ``environment`` is added to that of this process, as a daemon adds to its own. The import path
    is this process's, as a daemon's.
    """
    path = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix="gpupool-imports-") as folder:
        address = f"{folder}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener, Path(folder, "log").open("wb") as log:
            listener.bind(address)
            listener.listen(64)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.functional.import_server", str(listener.fileno())],
                env=os.environ | {"PYTHONPATH": path} | dict(environment),
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield address
        finally:
            process.kill()
            process.wait()


# In a daemon's fork server


def become_forked(address: str, arguments: Sequence[str]) -> None:
    """Let the import server fork the fork server, and end as that ends.

    Returns at once if there is no fork: the caller then imports vLLM.
    """
    die_with_parent()
    wire = arguments.index("--wire-fd") + 1
    order = ForkOrder(list(arguments), dict(os.environ), os.getcwd())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [msgspec.json.encode(order)], [1, 2, int(arguments[wire])])
            answer = server.recv(_MAX_BYTES).decode()
        except OSError as exc:
            answer = str(exc)
        if not answer.isdecimal():
            print(f"the tests' import server did not fork: {answer}", file=sys.stderr, flush=True)
            return
        pid = int(answer)
        os.close(int(arguments[wire]))
        show_as(_MODULE, [PROXY, str(pid)])
        status = int(server.recv(100) or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def forked_for(words: Sequence[str]) -> int | None:
    """The process that a proxy with this command line stands for; None for another process."""
    line = " ".join(words)
    return int(line.rpartition(PROXY)[2]) if f" -m {_MODULE} {PROXY} " in line else None


# In the import server


def main(listener_fd: int) -> None:
    """Import vLLM, then fork until the parent ends."""
    die_with_parent()
    raise_file_limit()
    # The memory of the title is found at the first call, behind a whole environment.
    show_as("tests.functional.import_server", [])
    from gpupoold.system import fork_server
    from gpupoold.system.process import importing

    before = dict(os.environ)
    with importing():
        for name in _PRELOADED:
            fork_server._preload(name, _LOG_LEVEL)
    _Server(socket.socket(fileno=listener_fd), before, dict(os.environ)).serve()


def _differing(
    asked: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """The variables of an environment that vLLM may be imported differently for.

    ``before`` and ``after`` are those around the import here. A test that has imported vLLM leaves
    what the import sets to the daemons that it starts.
    """
    names = {
        name
        for name in asked.keys() | before.keys()
        if not name.startswith(_MAY_DIFFER) and not (name == _MAY_BE_ABSENT and name not in asked)
    }
    return sorted(n for n in names if asked.get(n) not in (before.get(n), after.get(n)))


@dataclass(slots=True)
class _Fork:
    proxy: socket.socket
    pid: int


class _Server:
    """Forks, passes on ends, and ends the forks of proxies that have ended."""

    def __init__(
        self, listener: socket.socket, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        self._listener = listener
        self._before, self._after = before, after
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._by_proxy: dict[int, _Fork] = {}
        self._by_process: dict[int, _Fork] = {}

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._listener.fileno():
                    self._take(self._listener.accept()[0])
                elif (fork := self._by_proxy.pop(fd, None)) is not None:
                    self._poll.unregister(fd)
                    os.kill(fork.pid, signal.SIGKILL)  # the proxy has ended
                elif (fork := self._by_process.pop(fd, None)) is not None:
                    self._poll.unregister(fd)
                    os.close(fd)
                    self._ended(fork)

    def _ended(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            fork.proxy.send(str(os.waitstatus_to_exitcode(status)).encode())
        if self._by_proxy.pop(fork.proxy.fileno(), None) is not None:
            self._poll.unregister(fork.proxy.fileno())
        fork.proxy.close()

    def _take(self, proxy: socket.socket) -> None:
        text, fds, _, _ = socket.recv_fds(proxy, _MAX_BYTES, 3)
        order = _decoder.decode(text)
        if reason := self._refusal(order) if len(fds) == 3 else f"{len(fds)} descriptors":
            proxy.send(reason.encode())
            proxy.close()
        elif (pid := os.fork()) == 0:
            _become(order, fds)
        else:
            fork = _Fork(proxy, pid)
            pidfd = os.pidfd_open(pid)
            self._by_proxy[proxy.fileno()] = self._by_process[pidfd] = fork
            for watched in (proxy.fileno(), pidfd):
                self._poll.register(watched, select.POLLIN)
            proxy.send(str(pid).encode())
        for fd in fds:
            os.close(fd)

    def _refusal(self, order: ForkOrder) -> str:
        """Why a fork would not be as an import of its own; empty if it would be."""
        arguments, environment = order.arguments, order.environment
        level = arguments[arguments.index("--log-level") + 1]
        preloaded = {word for word in arguments if word.endswith(".preload")}
        path = set(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
        differing = {
            "environment": _differing(environment, self._before, self._after),
            "log level": [] if level == _LOG_LEVEL else [level],
            "preloaded": sorted(preloaded.difference(_PRELOADED)),
            "import path": sorted(path.difference(sys.path, [os.getcwd()])),
        }
        return ", ".join(f"{what} differs: {names}" for what, names in differing.items() if names)


def _become(order: ForkOrder, fds: Sequence[int]) -> None:
    """Run as the fork server; does not return."""
    status = 1
    try:
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        wire_fd = os.dup(fds[2])
        os.closerange(3, wire_fd)
        os.closerange(wire_fd + 1, 4096)
        arguments = order.arguments
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        arguments[arguments.index("--wire-fd") + 1] = str(wire_fd)
        arguments[arguments.index("--parent-pid") + 1] = str(os.getppid())
        show_as(_MODULE, arguments)
        sys.argv = [_MODULE, *arguments]
        print("forked by the tests' import server", file=sys.stderr, flush=True)
        from gpupoold.system import fork_server

        fork_server.main()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
