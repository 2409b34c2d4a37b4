"""Message channels over a connected unix stream socket.

``AsyncChannel`` for the daemon and frontends (asyncio), ``BlockingChannel`` for
the worker's turn loop. Both carry file descriptors by ``SCM_RIGHTS``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_MAX_FDS = 16
_INT = struct.Struct("@i")

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 256 << 20


class ChannelClosed(ConnectionError):
    """The other process closed its end, died, or sent an invalid message."""


class DescriptorsLost(ChannelClosed):
    """A message's descriptors did not arrive, because this process has too many (``EMFILE``).

    The channel stays usable. A receiver that cannot handle the message without descriptors treats
    the channel as closed.
    """


class _Descriptors:
    """Received descriptors that no reader has taken yet, grouped by message.

    The kernel delivers one message's descriptors in one read, and never with another message's.
    """

    def __init__(self) -> None:
        self._groups: deque[tuple[deque[int], bool]] = deque()

    def add(self, fds: Sequence[int], *, is_whole: bool) -> None:
        """Record the descriptors of one read; not ``is_whole`` if the kernel dropped some."""
        if fds or not is_whole:
            self._groups.append((deque(fds), is_whole))

    def take(self) -> int:
        """Return the next descriptor, owned by the caller."""
        fds, is_whole = self._groups[0]
        if not fds:
            self._groups.popleft()
            raise DescriptorsLost("file descriptors of a message were lost: too many are open")
        fd = fds.popleft()
        if not fds and is_whole:
            self._groups.popleft()
        return fd

    def close(self) -> None:
        for fds, _ in self._groups:
            _close_all(fds)
        self._groups.clear()


class AsyncChannel(Generic[T]):
    """One end of a channel inside an event loop; not thread-safe.

    Writes are queued and flushed in order; ``send`` never blocks. Messages that arrived before the
    other end closed or died can still be received, with descriptors.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._incoming: asyncio.Queue[T | None] = asyncio.Queue()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._fds = _Descriptors()
        self._can_send = True
        self._is_open = True
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; ``fds`` are duplicated, so the caller may close the originals.

        Raises:
            ChannelClosed: the channel is already closed.
            FrameTooLong: the message is too long to send; the channel stays usable.
            OSError: ``fds`` cannot be duplicated; no data are sent.
        """
        self.send_frame(encode_frame(message), fds)

    def send_frame(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue an already encoded frame (used to forward without re-encoding)."""
        if not self._can_send:
            raise ChannelClosed("the channel is closed")
        idle = not self._outgoing
        self._outgoing.append((memoryview(frame), _duplicates(fds)))
        if idle:
            self._flush()

    async def receive(self) -> T:
        """Return the next message.

        Raises ChannelClosed: end of stream, or the other end sent an invalid message.
        """
        message = await self._incoming.get()
        if message is None:
            self._incoming.put_nowait(None)
            raise ChannelClosed("the other end closed the channel")
        return message

    def take_fd(self) -> int:
        """Return the next descriptor of the latest received message, owned by the caller.

        Raises DescriptorsLost: the descriptor did not arrive.
        """
        return self._fds.take()

    @property
    def closed(self) -> bool:
        return not self._can_send

    def close(self) -> None:
        """Close this end; ``receive`` raises after returning earlier messages."""
        self._hang_up()
        self._fds.close()

    def _on_readable(self) -> None:
        try:
            data = _receive_some(self._sock, self._fds)
            messages = self._decoder.feed(data)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up()
            return
        except ValueError as error:
            _logger.error("closing a channel: %s", error)
            self._hang_up()
            return
        if not data:
            self._hang_up()
        for message in messages:
            self._incoming.put_nowait(message)

    def _hang_up(self) -> None:
        """Close the socket; received messages and descriptors stay."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_sending()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._incoming.put_nowait(None)

    def _stop_sending(self) -> None:
        """Stop sending, because the other end no longer reads; received data stay readable."""
        self._can_send = False
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()

    def _flush(self) -> None:
        while self._outgoing:
            view, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self._sock, [view], fds) if fds else self._sock.send(view)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self._stop_sending()
                return
            _close_all(fds)
            if sent < len(view):
                self._outgoing[0] = (view[sent:], [])
                continue
            self._outgoing.popleft()
        self._loop.remove_writer(self._sock.fileno())


class BlockingChannel(Generic[T]):
    """One end of a channel in a plain thread, which both sends and receives."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder: FrameDecoder[T] = FrameDecoder(receives)
        self._ready: deque[T] = deque()
        self._fds = _Descriptors()
        self._poll = _poll_of(sock.fileno())

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send a message, blocking while the socket's buffer is full.

        Raises:
            ChannelClosed: the other end has closed or died.
            FrameTooLong: the message is too long to send; the channel stays usable.
        """
        frame = memoryview(encode_frame(message))
        try:
            sent = socket.send_fds(self._sock, [frame], list(fds)) if fds else 0
            self._sock.sendall(frame[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None, wake_fds: Sequence[int] = ()) -> T | None:
        """Return the next message, or None after ``timeout_s`` (None: wait for ever).

        Also returns None if one of ``wake_fds`` becomes readable first. Raises ChannelClosed: end
        of stream, or the other end sent an invalid message.
        """
        while not self._ready:
            poll = _poll_of(self._sock.fileno(), *wake_fds) if wake_fds else self._poll
            found = poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
            if not found or all(fd != self._sock.fileno() for fd, _ in found):
                return None
            try:
                data = _receive_some(self._sock, self._fds)
                self._ready.extend(self._decoder.feed(data))
            except (OSError, ValueError) as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other end closed the channel")
        return self._ready.popleft()

    def take_fd(self) -> int:
        """Return the next descriptor of the latest received message, owned by the caller.

        Raises DescriptorsLost: the descriptor did not arrive.
        """
        return self._fds.take()

    def close(self) -> None:
        """Close this end and descriptors that no reader took."""
        self._sock.close()
        self._fds.close()


def _poll_of(*fds: int) -> select.poll:
    """Return an object that waits until one of ``fds`` is readable."""
    # select.select() fails for descriptors above 1,023, and a parent may pass larger numbers.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def _receive_some(sock: socket.socket, fds: _Descriptors) -> bytes:
    """Return received bytes, empty at the end of the stream; add descriptors to ``fds``."""
    # socket.recv_fds() would drop the flags, and children would inherit the descriptors.
    room = socket.CMSG_LEN(_MAX_FDS * _INT.size)
    data, ancillary, flags, _ = sock.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    came: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(payload) - len(payload) % _INT.size
            came += [fd for (fd,) in _INT.iter_unpack(payload[:whole])]
    fds.add(came, is_whole=not flags & socket.MSG_CTRUNC)
    return data


def _duplicates(fds: Sequence[int]) -> list[int]:
    made: list[int] = []
    try:
        for fd in fds:
            made.append(os.dup(fd))
    except OSError:
        _close_all(made)
        raise
    return made


def _close_all(fds: list[int] | deque[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    fds.clear()


class FrameTooLong(ValueError):
    """A message is longer than ``MAX_FRAME_BYTES``: the receiver would close the channel.

    A frame is a little-endian ``uint32`` payload length and a msgpack payload. File descriptors are
    sent with the frames by ``SCM_RIGHTS``; messages that carry descriptors take the descriptors in
    order.
    """


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return a message as header and payload.

    Raises FrameTooLong: the frame exceeds ``MAX_FRAME_BYTES``.
    """
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        kind = type(message).__name__
        raise FrameTooLong(f"{kind} of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder(Generic[T]):
    """A decoder of a byte stream into messages of one union type."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages completed by ``data``, in order.

        Raises ValueError: a frame is longer than ``MAX_FRAME_BYTES`` or not a message of the union;
        the connection is unusable afterwards.
        """
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[start + HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return messages
