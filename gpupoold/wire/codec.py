"""Messages to bytes and back; no sockets.

A frame is a little-endian ``uint32`` payload length and a msgpack payload.
File descriptors are sent with the frames by ``SCM_RIGHTS``; messages that carry descriptors take
the descriptors in order.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 256 << 20


class FrameTooLong(ValueError):
    """A message is longer than ``MAX_FRAME_BYTES``: the receiver would close the channel."""


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return a message as header and payload.

    Raises:
        FrameTooLong: the frame exceeds ``MAX_FRAME_BYTES``.
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

        Raises:
            ValueError: a frame is longer than ``MAX_FRAME_BYTES`` or not a message of the union;
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
