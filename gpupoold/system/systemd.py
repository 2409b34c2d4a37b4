"""The daemon's side of systemd's protocols.

The protocols are ``sd_listen_fds(3)`` and ``sd_notify(3)``: descriptors from 3 on, with names in
the environment, and datagrams to the socket ``$NOTIFY_SOCKET``. Without systemd there are no
descriptors, and notifications are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Self

_logger = logging.getLogger(__name__)

_FIRST_FD = 3
_VARIABLES = (
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
)
# A stuck service manager must not block serving.
_SEND_TIMEOUT_S = 1.0

_STATUS_INTERVAL_S = 5.0
# sd_watchdog_enabled(3) recommends at least two pings per timeout.
_PINGS_PER_TIMEOUT = 3


@dataclass(frozen=True, slots=True)
class NamedFd:
    """A descriptor from systemd with its ``FileDescriptorName=`` or ``FDNAME=``."""

    fd: int
    name: str


@dataclass(frozen=True, slots=True)
class Environment:
    """Values of the environment variables; ``watchdog_s`` is None without a watchdog."""

    fds: tuple[NamedFd, ...] = ()
    notify_address: str = ""
    watchdog_s: float | None = None


def read_environment(variables: Mapping[str, str], pid: int) -> Environment:
    """Read the variables, ignoring variables for a process other than ``pid``."""
    is_ours = variables.get("LISTEN_PID") == str(pid)
    is_watched = variables.get("WATCHDOG_PID", str(pid)) == str(pid)
    watchdog_us = _count(variables.get("WATCHDOG_USEC")) if is_watched else 0
    return Environment(
        _named_fds(variables) if is_ours else (),
        variables.get("NOTIFY_SOCKET", ""),
        watchdog_us / 1e6 if watchdog_us else None,
    )


def take_environment(variables: MutableMapping[str, str], pid: int) -> Environment:
    """Read the variables and remove them, so that children inherit neither variables nor
    descriptors.
    """
    environment = read_environment(variables, pid)
    for name in _VARIABLES:
        variables.pop(name, None)
    for fd in environment.fds:
        fcntl.fcntl(fd.fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    return environment


def _named_fds(variables: Mapping[str, str]) -> tuple[NamedFd, ...]:
    num_fds = _count(variables.get("LISTEN_FDS"))
    names = variables.get("LISTEN_FDNAMES", "").split(":")
    names += ["unknown"] * (num_fds - len(names))
    return tuple(NamedFd(_FIRST_FD + index, names[index]) for index in range(num_fds))


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


class KeptSocket(socket.socket):
    """A listening socket that systemd keeps open after the daemon: clients wait in the queue."""


class Inherited:
    """Descriptors from systemd that no part of the daemon has taken yet."""

    def __init__(self, fds: Sequence[NamedFd]) -> None:
        self._fds = list(fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # After a failed start, known descriptors are left too.
        self._close_all()

    def socket(self, name: str) -> socket.socket | None:
        """Return the listening socket of this name, owned by the caller, or None."""
        found = next((fd for fd in self._fds if fd.name == name), None)
        if found is None:
            return None
        self._fds.remove(found)
        return KeptSocket(fileno=found.fd)

    def named(self, prefix: str) -> list[NamedFd]:
        """Return all descriptors whose names start with ``prefix``, owned by the caller."""
        found = [fd for fd in self._fds if fd.name.startswith(prefix)]
        self._fds = [fd for fd in self._fds if fd not in found]
        return found

    def close(self) -> None:
        """Close the descriptors that were not taken, with a warning."""
        for fd in self._fds:
            _logger.warning("systemd passed a descriptor with the unknown name %r", fd.name)
        self._close_all()

    def _close_all(self) -> None:
        for fd in self._fds:
            os.close(fd.fd)
        self._fds = []


class Notifier:
    """A sender of status messages to the service manager; without an address, sends nothing."""

    def __init__(self, address: str = "") -> None:
        """Set the address of ``$NOTIFY_SOCKET``: a path, or with @ an abstract name."""
        # On the socket an abstract name begins with a zero byte.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._status = ""
        self._is_failing = False

    @property
    def has_listener(self) -> bool:
        """True if a service manager receives the messages."""
        return bool(self._address)

    def send(self, *fields: str, fds: Sequence[int] = ()) -> bool:
        """Send ``NAME=value`` fields as one message; return False if sending fails.

        The caller keeps ``fds`` and may close them at once.
        """
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_SEND_TIMEOUT_S)
                sock.connect(self._address)
                socket.send_fds(sock, ["\n".join(fields).encode()], list(fds))
        except OSError as error:
            # Logged once, because messages are sent repeatedly.
            if not self._is_failing:
                _logger.warning("%s could not be sent to systemd: %s", fields[0], error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def ready(self) -> None:
        self.send("READY=1")

    def stopping(self, grace_s: float) -> None:
        """Announce the daemon's end, which may take ``grace_s``."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(grace_s * 1e6)}")

    def status(self, text: str) -> None:
        """Send a line for ``systemctl status``, unless the line is unchanged."""
        if text != self._status and self.send(f"STATUS={text}"):
            self._status = text

    def is_well(self) -> None:
        """Send a watchdog ping."""
        self.send("WATCHDOG=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Announce a reload of the configuration for the duration of the context.

        The daemon is ready again afterwards, also if the new configuration was refused.
        """
        # The time is required by Type=notify-reload and ignored otherwise.
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.send("READY=1")


class FdStore:
    """Descriptors that the service manager keeps while the daemon is down.

    ``stored`` has the returned descriptors with names; the caller of the constructor closes them or
    passes them on.
    """

    def __init__(self, notifier: Notifier, stored: Sequence[NamedFd] = ()) -> None:
        self.stored = list(stored)
        self._notifier = notifier

    @property
    def is_there(self) -> bool:
        """True if the service manager stores descriptors."""
        return self._notifier.has_listener

    def keep(self, name: str, fds: Sequence[int]) -> bool:
        """Store descriptors under a name; return False if the request cannot be sent."""
        # FDPOLL=0: a memfd has no end of file for systemd to watch.
        return self._notifier.send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=fds)

    def drop(self, name: str) -> None:
        """Close all stored descriptors of a name."""
        self._notifier.send("FDSTOREREMOVE=1", f"FDNAME={name}")


@contextlib.asynccontextmanager
async def informed(
    notifier: Notifier,
    watchdog_s: float | None,
    summary: Callable[[], str],
    failure_reason: Callable[[float], str],
) -> AsyncIterator[None]:
    """Send status and watchdog pings inside this context.

    The service manager kills a daemon without a ping for ``watchdog_s``; None disables the
    watchdog. ``failure_reason`` takes the monotonic time and returns why the daemon is stuck, empty
    if not. The event loop calls ``failure_reason``, so a stuck event loop sends no ping.
    """
    if not notifier.has_listener:
        yield
        return

    async def inform() -> None:
        interval_s = _STATUS_INTERVAL_S
        if watchdog_s is not None:
            interval_s = min(interval_s, watchdog_s / _PINGS_PER_TIMEOUT)
        reported = ""
        while True:
            problem = failure_reason(time.monotonic())
            if problem and problem != reported:
                _logger.error("no watchdog ping is sent: %s", problem)
            reported = problem
            if not problem and watchdog_s is not None:
                notifier.is_well()
            notifier.status(f"stuck: {problem}" if problem else summary())
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(inform(), name="informing")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
