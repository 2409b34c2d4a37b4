"""A small service manager: gives sockets and kept descriptors, and hears what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_MAX_BYTES = 1 << 16
_MAX_FDS = 64
# Puts descriptors where sd_listen_fds(3) has them, says so, and becomes the daemon.
_SHIM = """
import json, os, sys
fds, names = json.loads(sys.argv[1])
spare = [os.dup(fd) for fd in fds]
while any(fd < 3 + len(fds) for fd in spare):
    spare = [os.dup(fd) for fd in spare]
for target, fd in enumerate(spare, 3):
    os.dup2(fd, target)
os.closerange(3 + len(fds), max(spare, default=3) + 1)
os.environ |= {
    "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(names), "LISTEN_PID": str(os.getpid())
}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class FakeManager:
    """Listens at a notify socket in ``folder`` until it is left; keeps what it is to keep."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self.messages: list[dict[str, str]] = []
        self._stored: defaultdict[str, list[int]] = defaultdict(list)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="fake-manager")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"END=1", self.address)
        self._thread.join()
        self._socket.close()
        for name in list(self._stored):
            self._drop(name)

    @property
    def stored(self) -> dict[str, list[int]]:
        """The kept descriptors by name."""
        with self._changed:
            return {name: list(fds) for name, fds in self._stored.items()}

    def values(self, field: str) -> list[str]:
        """All values that a field was sent with, in order."""
        with self._changed:
            return [message[field] for message in self.messages if field in message]

    def wait_for(self, field: str, num: int = 1, timeout_s: float = 60.0) -> None:
        """Return when a field has been sent so many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._count(field) >= num, timeout_s), field

    def start(
        self,
        arguments: Sequence[str],
        sockets: Mapping[str, socket.socket],
        environment: Mapping[str, str],
        log: Path,
    ) -> subprocess.Popen[bytes]:
        """Start ``python ARGUMENTS`` with the named sockets and all that is kept."""
        named = [(name, sock.fileno()) for name, sock in sockets.items()]
        named += [(name, fd) for name, fds in self.stored.items() for fd in fds]
        handed = json.dumps([[fd for _, fd in named], [name for name, _ in named]])
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-c", _SHIM, handed, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(environment) | {"NOTIFY_SOCKET": self.address},
                pass_fds=[fd for _, fd in named],
            )

    def _count(self, field: str) -> int:
        return sum(field in message for message in self.messages)

    def _listen(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._socket, _MAX_BYTES, _MAX_FDS)
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "END" in fields:
                return
            with self._changed:
                self._note(fields, fds)
                self.messages.append(fields)
                self._changed.notify_all()

    def _note(self, fields: dict[str, str], fds: list[int]) -> None:
        if "FDSTORE" in fields:
            self._stored[fields["FDNAME"]] += fds
        elif "FDSTOREREMOVE" in fields:
            self._drop(fields["FDNAME"])
        else:
            for fd in fds:
                os.close(fd)

    def _drop(self, name: str) -> None:
        for fd in self._stored.pop(name, []):
            with contextlib.suppress(OSError):
                os.close(fd)
