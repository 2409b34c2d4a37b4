"""Frames: every message, any split, and what is no frame."""

from __future__ import annotations

import functools
import operator
import struct
from typing import Any, get_args

import msgspec
import pytest

from gpupoold.wire import channel, messages as m
from gpupoold.wire.channel import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameTooLong,
    encode_frame,
)
from tests.unit.wire.samples import MESSAGES

UNIONS = {
    "ToWorker": m.ToWorker,
    "FromWorker": m.FromWorker,
    "ToFrontend": m.ToFrontend,
    "FromFrontend": m.FromFrontend,
    "ToForkServer": m.ToForkServer,
    "FromForkServer": m.FromForkServer,
    "ToInspection": m.ToInspection,
    "FromInspection": m.Inspected,
}
# Frontends and their grammar checkers have messages of their own.
WIRE = "gpupoold.wire.messages"
EVERYTHING: Any = functools.reduce(operator.or_, UNIONS.values())


def kinds_of(union: Any) -> tuple[type[m.Message], ...]:
    """The messages of a conversation, which may have only one."""
    return get_args(union) or (union,)


def test_there_is_a_sample_of_every_message() -> None:
    kinds = {kind for union in UNIONS.values() for kind in kinds_of(union)}
    defined = {kind for kind in m.Message.__subclasses__() if kind.__module__.startswith(WIRE)}
    assert {type(message) for message in MESSAGES} == kinds == defined


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    for name, union in UNIONS.items():
        if type(message) in kinds_of(union):
            decoded: list[m.Message] = FrameDecoder(union).feed(encode_frame(message))
            assert decoded == [message], name


@pytest.mark.parametrize("name", UNIONS)
def test_a_message_of_another_conversation_is_refused(name: str) -> None:
    for message in MESSAGES:
        if type(message) not in kinds_of(UNIONS[name]):
            with pytest.raises(ValueError, match="Invalid value"):
                FrameDecoder(UNIONS[name]).feed(encode_frame(message))


def test_a_stream_cut_at_every_byte() -> None:
    stream = b"".join(encode_frame(message) for message in MESSAGES)
    for cut in range(len(stream) + 1):
        decoder: FrameDecoder[m.Message] = FrameDecoder(EVERYTHING)
        assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == MESSAGES


def test_a_stream_byte_by_byte() -> None:
    stream = b"".join(encode_frame(message) for message in MESSAGES)
    decoder: FrameDecoder[m.Message] = FrameDecoder(EVERYTHING)
    decoded = [message for byte in stream for message in decoder.feed(bytes([byte]))]
    assert decoded == MESSAGES


def test_a_decoded_message_does_not_change_with_later_data() -> None:
    first, second = m.AddRequest("m", "r", 0.0, 0, 1, [b"first"]), m.Shutdown()
    decoder: FrameDecoder[m.Message] = FrameDecoder(EVERYTHING)
    (message,) = decoder.feed(encode_frame(first) + encode_frame(second)[:3])
    decoder.feed(encode_frame(second)[3:])
    assert message == first


def test_messages_are_compared_by_value_and_have_their_defaults() -> None:
    assert m.Call(1, "x").args == {}
    one, other = m.Call(1, "x"), m.Call(2, "x")
    one.args["a"] = 1
    assert other.args == {}


def test_an_oversized_frame_is_refused_by_its_header() -> None:
    decoder: FrameDecoder[m.Message] = FrameDecoder(EVERYTHING)
    with pytest.raises(ValueError, match=f"frame of {MAX_FRAME_BYTES + 1} bytes"):
        decoder.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))


def test_a_message_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 1000)
    assert len(encode_frame(m.UnloadModel("x" * 900))) > 900
    with pytest.raises(FrameTooLong, match=r"UnloadModel of 10.. bytes is over the limit of 1000"):
        encode_frame(m.UnloadModel("x" * 1000))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x80", b"\x00" * 9, b"\xff" * 9, msgspec.msgpack.encode({"type": "Nothing"})],
)
def test_garbage_is_a_value_error(payload: bytes) -> None:
    decoder: FrameDecoder[m.Message] = FrameDecoder(EVERYTHING)
    with pytest.raises(ValueError, match=r"."):
        decoder.feed(struct.pack("<I", len(payload)) + payload)


def test_a_field_of_the_wrong_type_is_a_value_error() -> None:
    wrong = msgspec.msgpack.encode({"type": "UnloadModel", "name": 5})
    decoder: FrameDecoder[m.Message] = FrameDecoder(m.ToWorker)
    with pytest.raises(ValueError, match="Expected `str`"):
        decoder.feed(struct.pack("<I", len(wrong)) + wrong)


def test_header() -> None:
    frame = encode_frame(m.Shutdown())
    assert HEADER_BYTES == 4
    assert struct.unpack("<I", frame[:4]) == (len(frame) - 4,)
