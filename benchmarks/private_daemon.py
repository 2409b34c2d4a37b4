"""A daemon of one's own, in a temporary folder: for benchmarks, the demo and tests."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo
from gpupoold.errors import Failed, GpupoolError, TimedOut
from gpupoold.system.process import die_with_parent

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_ROOT = str(Path(__file__).resolve().parents[1])


class Process(Protocol):
    """What :class:`subprocess.Popen` and a forked process have in common."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Process]
"""Starts ``gpupoold`` with arguments, a whole environment and a file for its output."""


@dataclass(frozen=True, slots=True)
class PrivateDaemon:
    """A running daemon and its addresses."""

    process: Process
    socket_path: Path
    http_url: str
    log_path: Path

    def client(self) -> AdminClient:
        """Return a client of its admin API."""
        return AdminClient(self.socket_path)

    def add_model(self, name: str, source: Path, **options: object) -> ModelInfo:
        """Register a checkpoint and wait until the model serves.

        Raises:
            GpupoolError: the daemon's error.
        """
        body = AddModelRequest.model_validate({"name": name, "source": str(source)} | options)
        with self.client() as client:
            for progress in client.add_model(body):
                if progress.model is not None:
                    return progress.model
        raise Failed(f"{name}: the daemon did not report the result")


def daemon_environment() -> dict[str, str]:
    """Return variables for the import path of this process, and operations that measure."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (*sys.path, _ROOT))),
        "GPUPOOL_OPERATIONS": "benchmarks.in_worker",
    }


def start_process(
    arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Run ``python -m gpupoold``, which dies with the thread that starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpupoold", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )


@contextlib.contextmanager
def private_daemon(
    config: str,
    folder: Path | None = None,
    timeout_s: float = _START_TIMEOUT_S,
    server: str = "",
    start: Start = start_process,
) -> Iterator[PrivateDaemon]:
    """Start ``gpupoold`` with its own folders and a free port; stop the daemon at the end.

    The daemon is ready when all its frontends are.
    ``config`` is TOML without ``[paths]`` and ``[server]``; ``server`` has further keys of the
    latter. A given ``folder`` is kept, a temporary one removed.

    Raises:
        Failed: the daemon ended before it was ready; the message has the end of its log.
        TimedOut: the daemon was not ready in time.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupool-")))
        folder.mkdir(parents=True, exist_ok=True)
        config_path = folder / "gpupool.toml"
        # Last, so that ``config`` may begin with keys outside any table.
        config_path.write_text(f"{config}\n{_PATHS.format(folder=folder, server=server)}")
        log_path = folder / "daemon.log"
        with log_path.open("wb") as log:
            environment = os.environ | daemon_environment()
            process = start(["--config", str(config_path)], environment, log)
        stack.callback(_stop, process)
        socket_path = folder / "run" / "admin.sock"
        http_url = _wait_ready(process, socket_path, log_path, timeout_s)
        yield PrivateDaemon(process, socket_path, http_url, log_path)


_PATHS = """\
[server]
port = 0
{server}

[paths]
state_dir = "{folder}/state"
runtime_dir = "{folder}/run"
model_dirs = ["{folder}/models"]

"""


def _wait_ready(process: Process, socket_path: Path, log_path: Path, timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            tail = log_path.read_text(errors="replace").splitlines()[-5:]
            raise Failed("gpupoold ended: " + " / ".join(tail), f"see {log_path}")
        with contextlib.suppress(GpupoolError), AdminClient(socket_path) as client:
            status = client.status()
            are_frontends_ready = all(one.state == "ready" for one in status.frontends)
            if status.state == "ready" and are_frontends_ready:
                return status.http_url
        time.sleep(_POLL_S)
    raise TimedOut(f"gpupoold was not ready within {timeout_s:g} s", f"see {log_path}")


def _stop(process: Process) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
