"""Tests of ``fleet/entrance.py`` and ``fleet/entrance.py``, before scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import httpx
import pytest
import uvicorn

from gpupoold.access.fleet import HEADER, verified
from gpupoold.access.secret import make_key
from gpupoold.domain import Priority
from gpupoold.fleet import asgi, entrance as entrance_module
from gpupoold.fleet.cluster import FleetTable, Node
from gpupoold.fleet.entrance import Entrance
from gpupoold.wire.continuation import CONTINUES_HEADER
from tests.support.quick_server import QuickServer
from tests.unit.fleet.fleets import model, report

SECRET = "ab" * 32
PATH = "/v1/chat/completions"
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream")]

Message = MutableMapping[str, Any]
Answer = Callable[["ScriptedNode", bytes, Callable[[Message], Awaitable[None]]], Awaitable[None]]


class ScriptedNode:
    """An HTTP server that answers as told, and keeps what it was asked."""

    def __init__(self, name: str, answer: Answer) -> None:
        self.name = name
        self.answer = answer
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(self, log_config=None, lifespan="off")
        self.server = QuickServer(config)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await whole(send, 200, {})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.bodies.append(body)
        self.headers.append(headers)
        await self.answer(self, body, send)

    def kill(self) -> None:
        """Close the listener and all connections at once."""
        for server in self.server.servers:
            server.close()
        self.listener.close()
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


async def whole(send: Any, status: int, value: object, headers: Any = ()) -> None:
    body = json.dumps(value).encode()
    start = {"type": "http.response.start", "status": status, "headers": [*JSON, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def chunk(text: str, *tokens: int) -> bytes:
    choice = {"index": 0, "delta": {"content": text}}
    comment = f": gpupool-tokens 0 {','.join(map(str, tokens))} \n\n" if tokens else ""
    return comment.encode() + b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def works(node: ScriptedNode, body: bytes, send: Any) -> None:
    await whole(send, 200, {"node": node.name})


def refuses(status: int) -> Answer:
    async def answer(node: ScriptedNode, body: bytes, send: Any) -> None:
        await whole(send, status, {"error": {"code": status}}, [(b"retry-after", b"7")])

    return answer


async def dies(node: ScriptedNode, body: bytes, send: Any) -> None:
    node.kill()
    await asyncio.sleep(60)


async def begin_stream(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    event = chunk("ab", 1, 2)
    await send({"type": "http.response.body", "body": event, "more_body": True})
    await asyncio.sleep(0.1)


async def dies_in_a_stream(node: ScriptedNode, body: bytes, send: Any) -> None:
    await begin_stream(send)
    node.kill()
    await asyncio.sleep(60)


async def falls_silent(node: ScriptedNode, body: bytes, send: Any) -> None:
    """As a machine without power: nothing comes, and new connections are not taken."""
    await begin_stream(send)
    for server in node.server.servers:
        server.close()
    await asyncio.sleep(60)


async def goes_on(node: ScriptedNode, body: bytes, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    events = chunk("ab") + chunk("c", 3) + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": events})


@contextlib.asynccontextmanager
async def fleet(
    priorities: Mapping[str, Priority] | None = None, **answers: Answer
) -> AsyncIterator[tuple[httpx.AsyncClient, list[ScriptedNode]]]:
    """A client of an entrance before these nodes, the first one the quickest."""
    nodes = [ScriptedNode(name, answer) for name, answer in answers.items()]
    serving = [asyncio.create_task(one.server._serve([one.listener])) for one in nodes]
    table = FleetTable(
        1,
        SECRET,
        tuple(
            Node(one.name, one.url, report(model("m", first_token_in_s=4.0 * n)), 0.0)
            for n, one in enumerate(nodes)
        ),
        priorities=priorities or {},
    )
    entrance = Entrance()
    await entrance.start()
    entrance.replace(table)
    listener = socket.create_server(("127.0.0.1", 0))
    server = QuickServer(uvicorn.Config(entrance, log_config=None, lifespan="off"))
    serving.append(asyncio.create_task(server._serve([listener])))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client, nodes
    finally:
        for running in (server, *(one.server for one in nodes)):
            running.force_exit = running.should_exit = True
        await entrance.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        for each in (listener, *(one.listener for one in nodes)):
            each.close()


def asking(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | changes


async def test_a_head_request_gets_no_body() -> None:
    async with fleet(a=works) as (client, _):
        for path in ("/health", "/v1/models"):
            answer = await client.head(path)
            assert answer.content == b""
            assert int(answer.headers["content-length"]) > 0
            assert "x-gpupool-node" not in answer.headers


async def test_a_key_of_low_priority_leaves_the_first_node_to_others() -> None:
    low, other = make_key(), make_key()
    async with fleet({low.id: Priority.LOW}, a=works, b=works) as (client, _):
        for key, node in ((low, "b"), (other, "a")):
            answer = await client.post(PATH, json=asking(), headers={"x-api-key": key.text})
            assert answer.json() == {"node": node}


async def test_requests_are_passed_on_without_forged_headers() -> None:
    async with fleet(a=works) as (client, (node,)):
        headers = {"authorization": "Bearer key", HEADER: "forged", CONTINUES_HEADER: "1"}
        answer = await client.post(f"{PATH}?x=1", json=asking(), headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"node": "a"})
        assert answer.headers["x-gpupool-node"] == "a"
        sent = node.headers[0]
        assert sent["authorization"] == "Bearer key"
        assert HEADER not in sent
        assert CONTINUES_HEADER not in sent
        assert json.loads(node.bodies[0]) == asking()


async def test_streams_that_can_continue_are_signed() -> None:
    async with fleet(a=works) as (client, (node,)):
        await client.post(PATH, json=asking(stream=True))
        await client.post(PATH, json=asking(stream=True, echo=True))
        signature = verified(SECRET, "POST", PATH, node.headers[0][HEADER])
        assert signature is not None
        assert signature.covers(node.bodies[0])
        assert HEADER not in node.headers[1]  # no comments with tokens, which nobody would drop


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refusal_sends_a_request_to_the_next_node(status: int) -> None:
    async with fleet(a=refuses(status), b=works) as (client, nodes):
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert len(nodes[0].bodies) == 1


async def test_the_last_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(a=refuses(503), b=refuses(429)) as (client, _):
        answer = await client.post(PATH, json=asking())
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"


async def test_a_model_that_the_fleet_has_moved_is_asked_for_elsewhere() -> None:
    async def moved(node: ScriptedNode, body: bytes, send: Any) -> None:
        await whole(send, 404, {"error": {"code": "model_not_found"}})

    async with fleet(a=moved, b=works) as (client, _):
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert (await client.post(PATH, json=asking(stream=True))).json() == {"node": "b"}


async def test_what_a_node_does_not_find_is_told() -> None:
    async with fleet(a=refuses(404), b=works) as (client, nodes):
        assert (await client.post(PATH, json=asking())).status_code == 404
        assert not nodes[1].bodies


async def test_other_errors_are_the_clients() -> None:
    async with fleet(a=refuses(400), b=works) as (client, nodes):
        assert (await client.post(PATH, json=asking())).status_code == 400
        assert not nodes[1].bodies


async def test_a_node_that_dies_before_its_answer() -> None:
    async with fleet(a=dies, b=works) as (client, nodes):
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert len(nodes[0].bodies) == 1, "a dead node is asked again"


@pytest.mark.parametrize("ending", [dies_in_a_stream, falls_silent])
async def test_a_stream_goes_on(ending: Answer) -> None:
    async with fleet(a=ending, b=goes_on) as (client, nodes):
        answer = await client.post(PATH, json=asking(stream=True))
        assert answer.text.count("[DONE]") == 1
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        texts = [json.loads(line)["choices"][0]["delta"]["content"] for line in lines]
        assert "".join(texts) == "abc"
        continued = json.loads(nodes[1].bodies[0])
        assert continued["request"] == asking(stream=True)
        assert continued["outputs"] == [{"token_ids": [1, 2], "finish_reason": None}]
        assert nodes[1].headers[0][CONTINUES_HEADER] == "1"
        assert nodes[0].headers[0]["x-request-id"] == nodes[1].headers[0]["x-request-id"]


async def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    async with fleet(a=dies_in_a_stream, b=goes_on) as (client, nodes):
        answer = await client.post(PATH, json=asking(stream=True, echo=True))
        error = json.loads(answer.text.split("data: ")[-2])["error"]
        assert error["code"] == 503
        assert answer.text.endswith("data: [DONE]\n\n")
        assert not nodes[1].bodies


async def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance_module, "_PATIENCE_S", 0.5)
    async with fleet(a=dies) as (client, _):
        answer = await client.post(PATH, json=asking())
        assert answer.status_code == 503
        assert "does not answer" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_frees_the_node() -> None:
    left = asyncio.Event()

    async def waits(node: ScriptedNode, body: bytes, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            while True:
                event = {"type": "http.response.body", "body": chunk("a"), "more_body": True}
                await send(event)
                await asyncio.sleep(0.05)
        finally:
            left.set()

    async with fleet(a=waits) as (client, nodes):
        async with client.stream("POST", PATH, json=asking(stream=True)) as answer:
            async for _ in answer.aiter_raw():
                break
        for _ in range(100):
            if not nodes[0].server.server_state.connections:
                break
            await asyncio.sleep(0.05)
        probes = len(nodes[0].server.server_state.connections)
        assert probes <= 1, "the node still sends"


async def test_before_the_first_table_clients_are_asked_to_come_again() -> None:
    entrance, sent = Entrance(), list[Message]()
    await entrance.start()

    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(asking()).encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Message = {"type": "http", "path": PATH, "method": "POST", "headers": []}
    await entrance(scope, receive, send)
    assert sent[0]["status"] == 503
    entrance.replace(FleetTable(1, SECRET))
    await entrance(scope, receive, send)
    assert sent[2]["status"] == 404
    await entrance.close()


async def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_BODY_BYTES", 1000)
    async with fleet(a=works) as (client, nodes):
        answer = await client.post(PATH, json=asking(filler="x" * 2000))
        assert answer.status_code == 413
        assert not nodes[0].bodies
        monkeypatch.setattr(entrance_module, "MAX_HELD_BYTES", 100)
        answer = await client.post(PATH, json=asking(filler="x" * 200))
        assert answer.status_code == 429
        monkeypatch.setattr(entrance_module, "MAX_HELD_BYTES", 1000)
        assert (await client.post(PATH, json=asking(filler="x" * 200))).status_code == 200


async def redirects(node: ScriptedNode, body: bytes, send: Any) -> None:
    await whole(send, 307, {}, [(b"location", b"/elsewhere")])


async def never_ends(node: ScriptedNode, body: bytes, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": JSON})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        await asyncio.sleep(0)


async def says_nothing(node: ScriptedNode, body: bytes, send: Any) -> None:
    await asyncio.sleep(60)


def streams(event: bytes) -> Answer:
    async def answer(node: ScriptedNode, body: bytes, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": event})

    return answer


def lists(value: object) -> Answer:
    async def answer(node: ScriptedNode, body: bytes, send: Any) -> None:
        await whole(send, 200, value)

    return answer


async def test_a_redirection_of_a_node_is_neither_followed_nor_told() -> None:
    async with fleet(a=redirects, b=works) as (client, nodes):
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert len(nodes[0].bodies) == 1


async def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_ANSWER_BYTES", 1_000_000)
    async with fleet(a=never_ends, b=works) as (client, _):
        assert (await client.post(PATH, json=asking())).json() == {"node": "b"}
        assert (await client.get("/v1/models")).status_code == 503  # b's list is none


@pytest.mark.parametrize(
    "event",
    [
        b"data: {" + b"\n\n",
        b"data: " + b"[" * 200_000 + b"\n\n",
        b'data: {"choices": 3}\n\n',
        b'data: {"choices": [{"index": {}, "delta": 3}]}\n\n',
        b": gpupool-tokens x y z\n\n",
        b": gpupool-tokens 0 1,1e9 \n\n",
    ],
)
async def test_an_event_of_another_form_is_given_up(event: bytes) -> None:
    async with fleet(a=streams(event), b=goes_on) as (client, _):
        answer = await client.post(PATH, json=asking(stream=True))
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"type": [], "index": {}, "output_index": []}\n\n',
        b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 7}}\n\n',
        b"data: 7\n\n",
    ],
)
async def test_an_event_of_a_message_of_another_form(
    event: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance_module, "_PATIENCE_S", 0.5)
    async with fleet(a=streams(event)) as (client, _):
        answer = await client.post("/v1/messages", json=asking(stream=True, max_tokens=4))
        assert answer.status_code == 503


async def test_a_list_of_models_leaves_out_nodes_that_list_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entrance_module, "_LIST_TIMEOUT_S", 0.5)
    row = {"id": "m", "object": "model"}
    nodes = fleet(
        a=lists({"data": [row]}), b=lists([]), c=lists({"data": [{"id": []}]}), d=says_nothing
    )
    async with nodes as (client, _):
        assert (await client.get("/v1/models")).json()["data"] == [row]
