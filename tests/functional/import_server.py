"""A process that has imported vLLM, and forks the processes of tests that would import vLLM.

Every daemon's fork server imports vLLM, nine seconds of a core; the functional tests start about
eighty daemons, and workers and frontends without a daemon. ``imported/sitecustomize.py`` is on the
path of these: a process that begins asks for a fork of this process, with its own descriptors,
arguments and environment, and stays as a proxy that ends with the fork and the fork with it. A
process whose environment may change what vLLM does at its import gets no fork, and imports.
"""

from __future__ import annotations

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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpupoold.system.process import die_with_parent, raise_file_limit, show_as

ADDRESS = "GPUPOOL_TEST_IMPORT_SERVER"
PROXY = "proxy of process"
_FORK_SERVER = "gpupoold.system.fork_server"
_MAX_BYTES = 100_000
_MAX_FDS = 16
# What vLLM does not read at its import; the import path is compared by itself.
# Three are set by frontends and workers, each to another value, and for simulated devices
# to the value that the CPU build has anyway.
_MAY_DIFFER = (
    *("PYTEST_", "GPUPOOL_", "PYTHONPATH", "PWD"),
    *("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_TARGET_DEVICE"),
    # An engine in the test's process has set these; an engine in the fork sets the same.
    *("LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
    *("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"),
    *("VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_WORKER_MULTIPROC_METHOD"),
)
# Of emulated devices alone, and of workers; in other processes these do no harm.
_MAY_BE_ABSENT = ("GLIBC_TUNABLES", "OMP_NUM_THREADS")
_PRELOADED = ["gpupoold.frontend.preload", "gpupoold.worker.environment"]
_LOG_LEVEL = "info"


class ForkOrder(msgspec.Struct):
    """Module, command line, environment and working folder of a fork.

    The descriptors that come with the order are standard output and error, and those that
    ``fd_options`` of the command line name.
    """

    module: str
    fd_options: list[str]
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


# In the process that would import vLLM


def become_forked(address: str, module: str, arguments: Sequence[str]) -> None:
    """Let the import server fork ``python -m module``, and end as the fork ends.

    Returns at once if there is no fork: the caller then imports vLLM.
    """
    die_with_parent()
    fds = {
        word: int(value) for word, value in itertools.pairwise(arguments) if word.endswith("-fd")
    }
    order = ForkOrder(module, list(fds), list(arguments), dict(os.environ), os.getcwd())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(address)
            socket.send_fds(server, [msgspec.json.encode(order)], [1, 2, *fds.values()])
            answer = server.recv(_MAX_BYTES).decode()
        except OSError as exc:
            answer = str(exc)
        if not answer.isdecimal():
            print(f"the tests' import server did not fork: {answer}", file=sys.stderr, flush=True)
            return
        pid = int(answer)
        for fd in fds.values():
            os.close(fd)
        show_as(module, [PROXY, str(pid)])
        status = int(server.recv(100) or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def forked_for(words: Sequence[str]) -> int | None:
    """The process that a proxy with this command line stands for; None for another process."""
    before, proxy, pid = " ".join(words).rpartition(f" {PROXY} ")
    return int(pid) if proxy and " -m " in before else None


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
        if not name.startswith(_MAY_DIFFER) and not (name in _MAY_BE_ABSENT and name not in asked)
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
        text, fds, _, _ = socket.recv_fds(proxy, _MAX_BYTES, _MAX_FDS)
        order = _decoder.decode(text)
        if reason := self._refusal(order):
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
        # Others set the level when they begin, forked or not.
        level = _LOG_LEVEL
        if order.module == _FORK_SERVER:
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
    """Run as the process that was to be; does not return."""
    status = 1
    try:
        stdout, stderr, *passed = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        bounds = [2, *sorted(passed), 4096]
        for below, above in itertools.pairwise(bounds):
            os.closerange(below + 1, above)
        arguments = order.arguments
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.folder)
        values = dict(zip(order.fd_options, passed, strict=True))
        for option, value in {**values, "--parent-pid": os.getppid()}.items():
            if option in arguments:
                arguments[arguments.index(option) + 1] = str(value)
        random.seed()  # otherwise all forks would draw equal numbers
        show_as(order.module, arguments)
        sys.argv = [order.module, *arguments]
        print("forked by the tests' import server", file=sys.stderr, flush=True)
        _main_of(order.module)()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _main_of(module: str) -> Callable[[], None]:
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    run: Callable[[], None] = found.main
    return run


if __name__ == "__main__":
    main(int(sys.argv[1]))
