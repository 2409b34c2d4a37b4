"""Answers on their way to the client: held headers, comments, facts about the wait."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from gpupoold.frontend.client_answer import ClientAnswer
from gpupoold.wire.messages import FirstToken

PLAIN = {"type": "http.response.start", "status": 200, "headers": []}
EVENTS = PLAIN | {"headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
PIECE = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b""}
FIRST = FirstToken("a", 1, 0.0, 0.25, 0.1, 0.05)
FACTS = "device=1 load_ms=0 queue_ms=250 switch_ms=100 prefill_ms=50"


class Client:
    def __init__(self) -> None:
        self.got: list[MutableMapping[str, Any]] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)
        self.got.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.got[0]["headers"])

    @property
    def text(self) -> str:
        return b"".join(one.get("body", b"") for one in self.got).decode()


@pytest.fixture
def client() -> Client:
    return Client()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_headers_of_a_stream_wait_for_its_first_event(client: Client) -> None:
    answer = ClientAnswer(client.send, waits=True)
    await answer.send(EVENTS)
    await settle()
    assert client.got == []
    answer.note(FIRST)
    answer.note_cached(48)
    await answer.send(PIECE)
    await answer.send(END)
    assert client.headers[b"x-gpupool-device"] == b"1"
    assert client.headers[b"x-gpupool-queue-ms"] == b"250"
    assert client.headers[b"x-gpupool-switch-ms"] == b"100"
    assert client.headers[b"x-gpupool-prefill-ms"] == b"50"
    assert client.headers[b"x-gpupool-cached-tokens"] == b"48"
    assert client.text == "data: 1\n\n"


async def test_a_comment_brings_the_headers_and_facts_come_before_the_first_event(
    client: Client,
) -> None:
    answer = ClientAnswer(client.send, waits=True)
    await answer.send(EVENTS)
    answer.comment("gpupool waiting place=2")
    await settle()
    answer.comment("gpupool waiting place=1")
    answer.comment("gpupool waiting place=0")  # dropped while the first is being sent
    await settle()
    answer.note(FIRST)
    answer.note(FirstToken("b", 2, 9.0, 9.0, 9.0, 9.0))  # of the same answer, later
    await answer.send(PIECE)
    await answer.send(PIECE)
    await answer.send(END)
    assert client.headers.keys() == {b"content-type"}
    assert client.text == (
        ": gpupool waiting place=2\n\n: gpupool waiting place=1\n\n"
        f": gpupool {FACTS}\n\ndata: 1\n\ndata: 1\n\n"
    )


async def test_no_comment_follows_the_end(client: Client) -> None:
    answer = ClientAnswer(client.send, waits=True)
    await answer.send(EVENTS)
    answer.comment("gpupool waiting")  # still to be sent when the answer ends
    await answer.send(PIECE)
    await answer.send(END)
    answer.comment("gpupool waiting")
    await settle()
    assert client.got[-1] == END


async def test_a_stream_that_fails_before_its_first_event_has_headers(client: Client) -> None:
    answer = ClientAnswer(client.send, waits=True)
    await answer.send(EVENTS)
    await answer.send(END)
    assert client.got == [EVENTS, END]


async def test_other_answers_have_the_facts_in_their_headers(client: Client) -> None:
    answer = ClientAnswer(client.send, waits=True)
    answer.note(FIRST)
    answer.comment("gpupool waiting")
    await answer.send(PLAIN)
    await answer.send(END)
    await settle()
    assert client.headers[b"x-gpupool-device"] == b"1"
    assert client.text == ""


async def test_streams_that_decline_comments_get_their_headers_at_once(client: Client) -> None:
    answer = ClientAnswer(client.send, waits=False)
    await answer.send(EVENTS)
    assert client.got == [EVENTS]
    answer.comment("gpupool waiting")
    answer.note(FIRST)
    await answer.send(PIECE)
    await settle()
    assert client.got == [EVENTS, PIECE]


async def test_a_client_that_left_ends_nothing_but_the_comment() -> None:
    async def send(message: MutableMapping[str, Any]) -> None:
        raise OSError("gone")

    answer = ClientAnswer(send, waits=True)
    await answer.send(EVENTS)
    answer.comment("gpupool waiting")
    await settle()
    with pytest.raises(OSError, match="gone"):
        await answer.send(PIECE)
