"""Messages between the daemon and its fork server."""

from __future__ import annotations

from gpupoold.wire.base import Message


class Fork(Message):
    """Start a module (daemon → fork server).

    With it come the descriptors of its log and of each of ``fd_options``.
    """

    call_id: int
    module: str
    arguments: list[str]
    fd_options: list[str]
    environment: dict[str, str]


class Forked(Message):
    """It runs (fork server → daemon). With it comes a pidfd."""

    call_id: int
    pid: int


class ForkFailed(Message):
    """It could not be started, for this reason; nothing of it runs (fork server → daemon)."""

    call_id: int
    reason: str


class KillForked(Message):
    """Kill a forked process (daemon → fork server): its pidfd did not reach the daemon."""

    pid: int


class ForkEnded(Message):
    """Exit status of a forked process, negative for a signal (fork server → daemon)."""

    pid: int
    status: int
