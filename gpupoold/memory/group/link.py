"""Messages between the ranks of a group, over connected unix sockets.

The ranks are processes of one program that the leader has forked, so messages are pickled.

The leader's orders are such messages: the name of a method of the followers and its arguments.
Orders have no answer: the leader goes on at once, a follower that fails ends its process, and the
group ends with it. Other threads of the leader have links of their own to each follower (*side
links*). A message on such a link says how many orders were sent before, and the follower carries
out these first.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_HEADER = struct.Struct("=QB")
_MAX_FDS = 4

_logger = logging.getLogger(__name__)

_CONFIRM = "confirm"
# Messages on the links for files that have no answer.
_UNANSWERED = frozenset({"close_region"})


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

        Raises RankLost: the other end is closed.
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

        Raises RankLost: the other end is closed.
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


@dataclass(eq=False, slots=True)
class OrderBook:
    """The leader's end of the links for orders; callable by all threads."""

    links: Sequence[Link]
    num_sent: int = field(default=0, init=False)
    """Number of orders so far, which side messages carry."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def send(self, method: str, *arguments: Any) -> int:
        """Order all followers to call a method; return the number of orders with this one.

        Raises RankLost: a follower has ended.
        """
        with self._lock:
            self._send(method, arguments)
            return self.num_sent

    def send_each(self, method: str, fds: Sequence[int], *arguments: Any) -> None:
        """Order each follower to call a method, with a descriptor of its own."""
        with self._lock:
            self._send(method, arguments, [[fd] for fd in fds])

    def wait(self) -> None:
        """Return when all followers have carried out the orders sent before."""
        with self._lock:
            self._send(_CONFIRM)
            for link in self.links:
                link.receive()

    def _send(
        self, method: str, arguments: tuple[Any, ...] = (), fds: Sequence[Sequence[int]] = ()
    ) -> None:
        """Send and count an order, with the descriptors in ``fds`` for each follower, if any."""
        pickled = pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL)
        self.num_sent += 1
        for link, own in zip(self.links, fds or [()] * len(self.links), strict=True):
            link.send_bytes(pickled, own)


class OrderCount:
    """The number of orders that a follower has carried out, for its other threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_done = 0

    def add(self) -> None:
        """Count one more order."""
        with self._condition:
            self._num_done += 1
            self._condition.notify_all()

    def wait_for(self, num_orders: int) -> None:
        """Return when this many orders have been carried out."""
        if self._num_done >= num_orders:
            return
        with self._condition:
            self._condition.wait_for(lambda: self._num_done >= num_orders)


def run_orders(link: Link, receivers: Sequence[object], done: OrderCount) -> None:
    """Call the ordered methods of ``receivers``; count the orders in ``done``.

    Raises:
        RankLost: the leader has ended.
        Exception: an order failed.
    """
    while True:
        (method, arguments), fds = link.receive()
        if method == _CONFIRM:
            link.send(None)
        else:
            _method_of(receivers, method)(*arguments, *fds)
        done.add()


def run_files(link: Link, receivers: Sequence[object], done: OrderCount) -> None:
    """Call methods of ``receivers`` after the orders sent before; answer with errors or "".

    Raises RankLost: the leader has ended.
    """
    while True:
        (num_orders, method, arguments), fds = link.receive()
        done.wait_for(num_orders)
        problem = ""
        try:
            _method_of(receivers, method)(*arguments, *fds)
        except Exception as error:
            _logger.exception("%s failed", method)
            problem = str(error) or type(error).__name__
        if method not in _UNANSWERED:
            link.send(problem)


def _method_of(receivers: Sequence[object], name: str) -> Callable[..., None]:
    methods = (getattr(receiver, name, None) for receiver in receivers)
    method: Callable[..., None] = next(found for found in methods if found is not None)
    return method
