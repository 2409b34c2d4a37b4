"""Message channels over a connected unix stream socket.

``AsyncChannel`` for the daemon and frontends (asyncio), ``BlockingChannel`` for
the instance's turn loop. Both carry file descriptors by ``SCM_RIGHTS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

from gpupoold.wire.codec import FrameDecoder, encode_frame

T = TypeVar("T")

_READ_BYTES = 1 << 20
_MAX_FDS = 16


class ChannelClosed(ConnectionError):
    """The other process closed its end or died."""


class AsyncChannel(Generic[T]):
    """One end of a channel inside an event loop; not thread-safe.

    Writes are queued and flushed in order; ``send`` never blocks.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._incoming: asyncio.Queue[T | None] = asyncio.Queue()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._fds: deque[int] = deque()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; ``fds`` are duplicated, so the caller may close its own.

        Raises:
            ChannelClosed: the channel is already known to be closed.
        """
        self.send_frame(encode_frame(message), fds)

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue an already encoded frame (used to forward without re-encoding)."""
        if self._closed:
            raise ChannelClosed("the channel is closed")
        idle = not self._outgoing
        self._outgoing.append((memoryview(frame), [os.dup(fd) for fd in fds]))
        if idle:
            self._flush()

    async def receive(self) -> T:
        """The next message.

        Raises:
            ChannelClosed: end of stream.
        """
        message = await self._incoming.get()
        if message is None:
            self._incoming.put_nowait(None)
            raise ChannelClosed("the other end closed the channel")
        return message

    def take_fd(self) -> int:
        """The descriptor that came with the message just received; the caller owns it."""
        return self._fds.popleft()

    @property
    def closed(self) -> bool:
        """Whether either side has closed."""
        return self._closed

    def close(self) -> None:
        """Close this end; ``receive`` raises from then on."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
        _close_all(self._fds)
        self._fds.clear()
        self._incoming.put_nowait(None)

    def _on_readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._fds.extend(fds)
        if not data:
            self.close()
            return
        for message in self._decoder.feed(data):
            self._incoming.put_nowait(message)

    def _flush(self) -> None:
        while self._outgoing:
            view, fds = self._outgoing[0]
            try:
                sent = _send_some(self._sock, view, fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self.close()
                return
            _close_all(fds)
            if sent < len(view):
                self._outgoing[0] = (view[sent:], [])
                continue
            self._outgoing.popleft()
        self._loop.remove_writer(self._sock.fileno())


class BlockingChannel(Generic[T]):
    """One end of a channel in a plain thread; one thread sends, the same thread receives."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._ready: deque[T] = deque()
        self._fds: deque[int] = deque()

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send a message, blocking while the socket's buffer is full.

        Raises:
            ChannelClosed: the other end is gone.
        """
        view, left = memoryview(encode_frame(message)), list(fds)
        try:
            while view:
                view = view[_send_some(self._sock, view, left) :]
                left = []
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None) -> T | None:
        """The next message, or None when none came within ``timeout_s`` (None waits for ever).

        Raises:
            ChannelClosed: end of stream.
        """
        while not self._ready:
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return None
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FDS)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            self._fds.extend(fds)
            if not data:
                raise ChannelClosed("the other end closed the channel")
            self._ready.extend(self._decoder.feed(data))
        return self._ready.popleft()

    def take_fd(self) -> int:
        """The descriptor that came with the message just received; the caller owns it."""
        return self._fds.popleft()

    def close(self) -> None:
        """Close this end."""
        self._sock.close()


def _send_some(sock: socket.socket, view: memoryview, fds: list[int]) -> int:
    if fds:
        return socket.send_fds(sock, [view], fds)
    return sock.send(view)


def _close_all(fds: list[int] | deque[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()
