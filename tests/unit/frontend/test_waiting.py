"""Comments in waiting streams: who is asked about, when, and what clients are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpupoold.frontend import gates
from gpupoold.frontend.client_answer import ClientAnswer
from gpupoold.frontend.gates import WaitComments, comment_of, wants_comments
from gpupoold.wire.messages import AskWaits, RequestProgress, RequestWait, Waits

INTERVAL_S = 0.02


async def _nowhere(_: object) -> None: ...


class Stream(ClientAnswer):
    def __init__(self, *, takes_comments: bool = True) -> None:
        super().__init__(_nowhere, waits=takes_comments)
        self._is_event_stream = True
        self.comments: list[str] = []

    def comment(self, text: str) -> None:
        self.comments.append(text)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(gates, "_LEAST_INTERVAL_S", INTERVAL_S)
    return []


def comments(asked: list[list[str]], interval_s: float = INTERVAL_S) -> WaitComments:
    def send(message: Any) -> None:
        assert isinstance(message, AskWaits)
        asked.append(message.request_ids)

    return WaitComments(send, interval_s)


async def until(asked: list[list[str]], count: int) -> None:
    async with asyncio.timeout(5):
        while len(asked) < count:
            await asyncio.sleep(INTERVAL_S / 4)


async def test_the_daemon_is_asked_about_streams_that_wait(asked: list[list[str]]) -> None:
    waits = comments(asked)
    first, second = Stream(), Stream()
    waits.begin("a", first)
    waits.begin("b", second)
    waits.begin("plain", Stream(takes_comments=False))
    await until(asked, 1)
    assert asked[0] == ["a", "b"]
    waits.told(Waits([RequestWait("a", 2, 4.25), RequestWait("gone", 1, 1.0)]))
    assert first.comments == ["gpupool waiting place=2 estimate_s=4.2"]
    assert second.comments == []
    waits.progressed([RequestProgress("a", [1])])
    waits.told(Waits([RequestWait("a", 1, 0.5)]))
    assert len(first.comments) == 1
    num_asked = len(asked)
    await until(asked, num_asked + 1)
    assert asked[-1] == ["b"]
    waits.end(["b", "plain"])
    await asyncio.sleep(3 * INTERVAL_S)
    num_asked = len(asked)
    await asyncio.sleep(3 * INTERVAL_S)
    assert len(asked) == num_asked  # nobody waits, nobody asks
    waits.begin("c", first)
    await until(asked, num_asked + 1)
    assert asked[-1] == ["c"]
    waits.end(["c"])


async def test_nobody_asks_without_an_interval(asked: list[list[str]]) -> None:
    waits = comments(asked, 0.0)
    waits.begin("a", Stream())
    await asyncio.sleep(2 * INTERVAL_S)
    assert asked == []


def test_a_request_without_an_estimate_is_told_what_is_known() -> None:
    assert comment_of(RequestWait("a", 0)) == "gpupool waiting"
    assert comment_of(RequestWait("a", 7)) == "gpupool waiting place=7"


@pytest.mark.parametrize(
    ("headers", "wants"),
    [
        ([], True),
        ([(b"x-gpupool-waiting", b"off")], False),
        ([(b"x-gpupool-waiting", b" OFF ")], False),
        ([(b"x-gpupool-waiting", b"on")], True),
    ],
)
def test_a_header_declines_comments(headers: list[tuple[bytes, bytes]], wants: bool) -> None:
    assert wants_comments({"headers": headers}) is wants
