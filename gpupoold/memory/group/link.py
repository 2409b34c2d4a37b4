"""Messages between the ranks of a group, over connected unix sockets.

The ranks are processes of one program that the leader has forked, so messages are pickled.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("=QB")
_MAX_FDS = 4


class RankLost(ConnectionError):
    """The process of another rank has ended."""


class Link:
    """One end of a connection; each direction is for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Return both ends of a new connection."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    def of(cls, fd: int) -> Link:
        """Return the end behind ``fd``, which the link owns from now on."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message with descriptors, of which the other end receives duplicates.

        Raises:
            RankLost: the other end is closed.
        """
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), fds)

    def send_bytes(self, pickled: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message that is already pickled, as ``send`` does."""
        frame = _HEADER.pack(len(pickled), len(fds)) + pickled
        try:
            sent = socket.send_fds(self._socket, [frame], list(fds)) if fds else 0
            self._socket.sendall(memoryview(frame)[sent:])
        except OSError as error:
            raise RankLost(f"another rank has ended: {error}") from error

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return the message and its descriptors, owned by the caller.

        Raises:
            RankLost: the other end is closed.
        """
        num_bytes, num_fds, fds = self._read_header()
        if len(fds) != num_fds:
            for fd in fds:
                os.close(fd)
            raise RankLost("descriptors of a message were lost: too many are open")
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            view = view[self._read_into(view) :]
        return pickle.loads(buffer), fds

    def close(self) -> None:
        self._socket.close()

    def _read_header(self) -> tuple[int, int, list[int]]:
        """Return the number of bytes and of descriptors of a message, and its descriptors."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_FDS)
        except OSError as error:
            raise RankLost(f"another rank has ended: {error}") from error
        while data and len(data) < _HEADER.size:
            rest = bytearray(_HEADER.size - len(data))
            data += rest[: self._read_into(memoryview(rest))]
        if not data:
            raise RankLost("another rank has ended")
        num_bytes, num_fds = _HEADER.unpack(data)
        return num_bytes, num_fds, fds

    def _read_into(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except OSError as error:
            raise RankLost(f"another rank has ended: {error}") from error
        if not count:
            raise RankLost("another rank has ended")
        return count
