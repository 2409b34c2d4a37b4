"""Cost of ``gpupool top`` in a terminal: share of a core, and time to the first screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil

_COLUMNS, _LINES = 120, 40
_SETTLE_S = 5.0
_FIRST_SCREEN_TIMEOUT_S = 30.0


def run_top(socket_path: Path, mark: str, duration_s: float) -> dict[str, Any]:
    """Run it for a while; a drawn screen has ``mark`` in it.

    Raises:
        TimeoutError: there was no such screen.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    command = [sys.executable, "-m", "gpupool_cli.start", "top"]
    environment = os.environ | {"GPUPOOL_SOCKET": str(socket_path), "TERM": "xterm-256color"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    started_s = time.monotonic()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        try:
            first_screen_s = _read_until(ours, mark.encode(), started_s)
            _drain(ours, _SETTLE_S)
            before_s, began_s = _cpu_s(process.pid), time.monotonic()
            num_bytes = _drain(ours, duration_s)
            cpu_s = _cpu_s(process.pid) - before_s
            wall_s = time.monotonic() - began_s
        finally:
            process.terminate()
            with contextlib.suppress(OSError):
                _drain(ours, 0.5)
            process.wait()
            os.close(ours)
    return {
        "first_screen_s": first_screen_s,
        "cpu_share": cpu_s / wall_s,
        "terminal_bytes_per_s": num_bytes / wall_s,
        "wall_s": wall_s,
    }


def _read_until(terminal: int, mark: bytes, started_s: float) -> float:
    seen = bytearray()
    while time.monotonic() < started_s + _FIRST_SCREEN_TIMEOUT_S:
        if select.select([terminal], [], [], 0.5)[0]:
            seen += os.read(terminal, 1 << 16)
            if mark in seen:
                return time.monotonic() - started_s
    raise TimeoutError(f"no {mark!r} on the screen: {bytes(seen[-300:])!r}")


def _drain(terminal: int, duration_s: float) -> int:
    """Read for so long; how many bytes came."""
    num_bytes, deadline_s = 0, time.monotonic() + duration_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if select.select([terminal], [], [], left_s)[0]:
            num_bytes += len(os.read(terminal, 1 << 16))
    return num_bytes


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
