"""What the service manager gives the daemon, and what the daemon tells it.

The protocols are those of ``sd_listen_fds(3)`` and ``sd_notify(3)``: descriptors from 3 on,
with their names in the environment, and datagrams to the socket ``$NOTIFY_SOCKET``. Without
systemd there are no descriptors, and what is told goes nowhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
# The service manager reads its socket all the time. One that does not shall not stop serving.
_SEND_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class NamedFd:
    """A descriptor that systemd handed over, under its ``FileDescriptorName=`` or ``FDNAME=``."""

    fd: int
    name: str


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment variables say. ``watchdog_s`` is None where nobody watches."""

    fds: tuple[NamedFd, ...] = ()
    notify_address: str = ""
    watchdog_s: float | None = None


def read_environment(variables: Mapping[str, str], pid: int) -> Environment:
    """Read the variables; those that are meant for another process than ``pid`` do not count."""
    is_ours = variables.get("LISTEN_PID") == str(pid)
    is_watched = variables.get("WATCHDOG_PID", str(pid)) == str(pid)
    watchdog_us = _count(variables.get("WATCHDOG_USEC")) if is_watched else 0
    return Environment(
        _named_fds(variables) if is_ours else (),
        variables.get("NOTIFY_SOCKET", ""),
        watchdog_us / 1e6 if watchdog_us else None,
    )


def take_environment(variables: MutableMapping[str, str], pid: int) -> Environment:
    """As :func:`read_environment`, for the daemon alone: its children get neither the variables
    nor the descriptors."""
    environment = read_environment(variables, pid)
    for name in _VARIABLES:
        variables.pop(name, None)
    for one in environment.fds:
        fcntl.fcntl(one.fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    return environment


def _named_fds(variables: Mapping[str, str]) -> tuple[NamedFd, ...]:
    num_fds = _count(variables.get("LISTEN_FDS"))
    names = variables.get("LISTEN_FDNAMES", "").split(":")
    names += ["unknown"] * (num_fds - len(names))
    return tuple(NamedFd(_FIRST_FD + index, names[index]) for index in range(num_fds))


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


class Inherited:
    """Descriptors that systemd handed over, until somebody takes them."""

    def __init__(self, fds: Sequence[NamedFd]) -> None:
        self._fds = list(fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def socket(self, name: str) -> socket.socket | None:
        """The listening socket of that name, the caller's from now on; None without one."""
        found = next((one for one in self._fds if one.name == name), None)
        if found is None:
            return None
        self._fds.remove(found)
        return socket.socket(fileno=found.fd)

    def named(self, prefix: str) -> list[NamedFd]:
        """All whose names begin so, the caller's from now on."""
        found = [one for one in self._fds if one.name.startswith(prefix)]
        self._fds = [one for one in self._fds if one not in found]
        return found

    def close(self) -> None:
        """Close what nobody took, and say so."""
        for one in self._fds:
            _logger.warning("systemd handed over a descriptor named %r, not known here", one.name)
            os.close(one.fd)
        self._fds = []


class Notifier:
    """Tells the service manager how the daemon is; one without an address tells nobody."""

    def __init__(self, address: str = "") -> None:
        """``address`` is that of ``$NOTIFY_SOCKET``: a path, or with @ an abstract name."""
        # An abstract name begins with a zero byte.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._status = ""
        self._is_failing = False

    @property
    def is_heard(self) -> bool:
        """True if there is somebody to tell."""
        return bool(self._address)

    def send(self, *fields: str, fds: Sequence[int] = ()) -> bool:
        """Send ``NAME=value`` fields as one message; False when it could not be sent.

        ``fds`` stay the caller's, who may close them at once.
        """
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_SEND_TIMEOUT_S)
                sock.connect(self._address)
                socket.send_fds(sock, ["\n".join(fields).encode()], list(fds))
        except OSError as error:
            # Once: much of it is said again and again.
            if not self._is_failing:
                _logger.warning("systemd was not told %s: %s", fields[0], error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    def ready(self) -> None:
        self.send("READY=1")

    def stopping(self, grace_s: float) -> None:
        """The daemon ends, for which it may need ``grace_s``."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(grace_s * 1e6)}")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; the same one again is not sent."""
        if text != self._status and self.send(f"STATUS={text}"):
            self._status = text

    def is_well(self) -> None:
        """Keep the watchdog from biting."""
        self.send("WATCHDOG=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Around a reload of the configuration; at its end the daemon is ready again, also when
        the new configuration was refused."""
        # The instant is needed with Type=notify-reload, and passed over otherwise.
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.send("READY=1")


class FdStore:
    """Descriptors that the service manager keeps while the daemon is not there.

    ``stored`` are those that it has handed back, their names included; the caller of the
    constructor gives them to whoever takes them.
    """

    def __init__(self, notifier: Notifier, stored: Sequence[NamedFd] = ()) -> None:
        self.stored = list(stored)
        self._notifier = notifier

    @property
    def is_there(self) -> bool:
        """True if somebody keeps what is given."""
        return self._notifier.is_heard

    def keep(self, name: str, fds: Sequence[int]) -> bool:
        """Have descriptors kept under a name; False when that could not be asked for."""
        # They are no files that could break: nobody needs to watch them.
        return self._notifier.send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=fds)

    def drop(self, name: str) -> None:
        """Have all descriptors of a name closed."""
        self._notifier.send("FDSTOREREMOVE=1", f"FDNAME={name}")
