"""Answers that are held back, passed on and replaced by a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.gates import Gate, Gates, WaitComments, has_asked
from gpupoold.wire.messages import AdmissionAnswer, AskWaits, FirstToken, FirstTokens

START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"piece", "more_body": True}
END = {"type": "http.response.body", "body": b""}

Api = Callable[["Client", Gate], Awaitable[None]]


class Client:
    """One HTTP request through a gate; ``got`` is what its client has got."""

    def __init__(self) -> None:
        self.asked: list[AskWaits] = []
        self.waits = WaitComments(self.asked.append, 0.5)  # type: ignore[arg-type]
        self.gates = Gates(self.waits)
        self.got: list[MutableMapping[str, Any]] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await asyncio.sleep(0)
        self.got.append(message)

    async def serve(self, api: Api, *, wants_comments: bool = True) -> None:
        async with self.gates.holding(self.send, wants_comments=wants_comments) as gate:
            await api(self, gate)

    async def passed(self, count: int) -> None:
        """Return when so many messages have come through."""
        while len(self.got) < count:
            await asyncio.sleep(0)

    def take(self, request_id: str) -> list[str]:
        return self.gates.answered(AdmissionAnswer("m", request_id))

    def refuse(self, request_id: str, status: int = 429) -> list[str]:
        return self.gates.answered(AdmissionAnswer("m", request_id, status, "no", 2.5))


async def served(api: Api) -> Client:
    client = Client()
    await client.serve(api)
    return client


async def test_a_request_s_wait_is_told_to_its_answer_until_its_end() -> None:
    first = FirstTokens([FirstToken("a", 1, 0.0, 0.25, 0.1, 0.05)])

    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        client.take("a")
        client.gates.first_tokens(first)
        client.gates.prefilled("a", 32)
        await gate.send(START)
        await gate.send(END)

    client = await served(api)
    headers = dict(client.got[0]["headers"])
    assert headers[b"x-gpupool-queue-ms"] == b"250"
    assert headers[b"x-gpupool-cached-tokens"] == b"32"
    client.gates.first_tokens(first)  # too late: nobody waits


async def test_headers_go_out_when_the_daemon_has_taken_it() -> None:
    async def api(client: Client, gate: Gate) -> None:
        await gate.send(START)
        client.gates.asked("a")
        await asyncio.sleep(0)
        assert client.got == []
        assert client.take("a") == []
        await client.passed(1)
        await gate.send(PIECE)
        assert client.got == [START, PIECE]
        await gate.send(END)

    assert (await served(api)).got == [START, PIECE, END]


async def test_pieces_before_the_request_wait_too() -> None:
    """The Responses API tells of a response before its engine has a request."""

    async def api(client: Client, gate: Gate) -> None:
        for message in (START, PIECE):
            await gate.send(message)
        client.gates.asked("a")
        client.take("a")
        await gate.send(END)

    assert (await served(api)).got == [START, PIECE, END]


async def test_refusal_replaces_the_answer() -> None:
    client = Client()

    async def api(client: Client, gate: Gate) -> None:
        await gate.send(START)
        client.gates.asked("a")
        assert client.refuse("a") == ["a"]
        for message in (PIECE, END):
            await gate.send(message)

    with pytest.raises(ApiError) as raised:
        await client.serve(api)
    assert client.got == []
    error = raised.value
    assert (error.status, error.kind, error.code) == (
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
    )
    assert error.headers() == [(b"retry-after", b"3")]


async def test_refusal_goes_before_what_the_api_raises() -> None:
    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        client.refuse("a", 503)
        raise RuntimeError("its engine failed")

    with pytest.raises(ApiError) as raised:
        await Client().serve(api)
    assert (raised.value.status, raised.value.body()["error"]["code"]) == (503, 503)  # type: ignore[index]


async def test_errors_of_the_api_are_its_own() -> None:
    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        raise RuntimeError("its engine failed")

    with pytest.raises(RuntimeError):
        await Client().serve(api)


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_only_a_stopping_server_asks_clients_to_try_again(is_stopping: bool) -> None:
    headers = [(b"content-type", b"application/json")]
    lost = {**START, "status": 503, "headers": headers}

    async def api(client: Client, gate: Gate) -> None:
        if is_stopping:
            client.gates.stop()
        client.gates.asked("a")
        client.take("a")
        await gate.send(lost)
        await gate.send(END)

    [start, end] = (await served(api)).got
    again = [(b"retry-after", b"1")] if is_stopping else []
    assert (start["headers"], end) == ([*headers, *again], END)


async def test_all_of_several_have_to_be_taken() -> None:
    async def api(client: Client, gate: Gate) -> None:
        await gate.send(START)
        for request_id in "abc":
            client.gates.asked(request_id)
        assert client.take("a") == client.take("b") == []
        await asyncio.sleep(0)
        assert client.got == []
        assert client.refuse("c") == ["a", "b", "c"]

    with pytest.raises(ApiError):
        await Client().serve(api)


async def test_those_taken_after_a_refusal_have_to_end() -> None:
    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        client.gates.asked("b")
        assert client.refuse("a") == ["a", "b"]
        assert client.take("b") == ["a", "b"]

    with pytest.raises(ApiError):
        await Client().serve(api)


async def test_later_ones_of_a_stream_end_within_it() -> None:
    """What has gone out cannot be taken back."""

    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        client.take("a")
        await gate.send(START)
        client.gates.asked("b")
        assert client.refuse("b") == ["b"]
        await gate.send(END)

    assert (await served(api)).got == [START, END]


async def test_later_ones_are_refused_before_there_is_output() -> None:
    """As the further inputs of a request for embeddings."""

    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        assert client.take("a") == []
        await asyncio.sleep(0)
        client.gates.asked("b")
        assert client.refuse("b") == ["a", "b"]
        await gate.send(START)
        await gate.send(END)

    with pytest.raises(ApiError) as refused:
        await served(api)
    assert refused.value.status == 429


async def test_answers_that_ask_for_nothing() -> None:
    async def api(client: Client, gate: Gate) -> None:
        await gate.send(START)
        assert client.got == []
        await gate.send(END)

    assert (await served(api)).got == [START, END]


async def test_whole_answers_do_not_wait_for_the_daemon() -> None:
    """The API found a mistake after its first sample was on its way."""

    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        await gate.send(START)
        await gate.send(END)

    client = await served(api)
    assert client.got == [START, END]
    assert client.refuse("a") == ["a"]


async def test_tasks_of_the_api_share_its_gate() -> None:
    async def api(client: Client, gate: Gate) -> None:
        async def ask() -> None:
            client.gates.asked("a")

        await asyncio.create_task(ask())
        client.refuse("a")

    with pytest.raises(ApiError):
        await Client().serve(api)


async def test_requests_without_a_client() -> None:
    client = Client()
    client.gates.asked("a")
    assert client.take("a") == []
    assert client.refuse("b") == ["b"]


async def test_api_that_fails_before_it_asks_was_asked_something_wrong() -> None:
    async def api(client: Client, gate: Gate) -> None:
        assert not has_asked()
        await gate.send(START)
        raise KeyError("background")

    client = Client()
    with pytest.raises(ApiError, match="background") as caught:
        await client.serve(api)
    assert caught.value.status == 400
    assert client.got == []


async def test_api_that_fails_after_it_asked_is_at_fault() -> None:
    async def api(client: Client, gate: Gate) -> None:
        client.gates.asked("a")
        assert has_asked()
        raise KeyError("background")

    with pytest.raises(KeyError):
        await Client().serve(api)
