"""The exit statuses of ``gpupool``, which scripts rely on."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of ``gpupool``; those of errors equal ``GpupoolError.exit_code``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DAEMON_NOT_RUNNING = 3
    NO_SUCH_MODEL = 4
    REFUSED = 5
    TIMED_OUT = 6
    INTERRUPTED = 130
