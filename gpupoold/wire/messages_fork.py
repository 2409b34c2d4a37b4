"""Messages between the daemon and its fork server."""

from __future__ import annotations

from gpupoold.wire.base import Message


class Fork(Message):
    """Start a module (daemon → fork server).

    Carries the descriptors of the log and of each of ``fd_options``.
    """

    call_id: int
    module: str
    arguments: list[str]
    fd_options: list[str]
    environment: dict[str, str]


class Forked(Message):
    """The module runs (fork server → daemon). Carries a pidfd."""

    call_id: int
    pid: int


class ForkFailed(Message):
    """The module could not be started; no process is left (fork server → daemon)."""

    call_id: int
    reason: str


class KillForked(Message):
    """Kill a forked process (daemon → fork server) whose pidfd did not reach the daemon."""

    pid: int


class ForkEnded(Message):
    """Exit status of a forked process, negative for a signal (fork server → daemon)."""

    pid: int
    status: int
