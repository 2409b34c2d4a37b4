"""Required fields are added to answers and events, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from gpupoold.frontend.answer_fields import completing

JSON_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-length", b"7"), (b"content-type", b"application/json")],
}
STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


async def sent(path: str, *messages: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    """What a client gets of an application's messages."""
    passed: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        passed.append(message)

    completed = completing(path, send)
    for message in messages:
        await completed(message)
    return passed


def whole(answer: object) -> dict[str, Any]:
    return {"type": "http.response.body", "body": json.dumps(answer).encode()}


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()


async def answered(path: str, answer: object) -> Any:
    start, body = await sent(path, JSON_START, whole(answer))
    length = dict(start["headers"])[b"content-length"]
    assert int(length) == len(body["body"])
    return json.loads(body["body"])


async def streamed(path: str, *events: bytes) -> list[Any]:
    bodies = [{"type": "http.response.body", "body": one, "more_body": True} for one in events]
    _, *passed = await sent(path, STREAM_START, *bodies)
    text = b"".join(one["body"] for one in passed).decode()
    return [json.loads(one.partition("data: ")[2]) for one in text.split("\n\n") if one]


MESSAGE = {
    "id": "1",
    "type": "message",
    "content": [{"type": "text", "text": "Hé"}, {"type": "tool_use", "id": "2", "input": {}}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 4},
}


async def test_a_message_of_anthropic_is_completed() -> None:
    answer = await answered("/v1/messages", MESSAGE)
    assert answer["usage"]["cache_creation_input_tokens"] == 0
    assert answer["usage"]["input_tokens"] == 3
    assert answer["stop_reason"] == "end_turn"
    assert answer["stop_sequence"] is None
    assert answer["content"][0] == {"type": "text", "text": "Hé", "citations": None}
    assert answer["content"][1]["caller"] == {"type": "direct"}


async def test_known_values_of_the_cache_are_kept() -> None:
    usage = {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 32}
    answer = await answered("/v1/messages", MESSAGE | {"usage": usage})
    assert answer["usage"]["cache_read_input_tokens"] == 32


async def test_events_of_anthropic_are_completed() -> None:
    started, delta, ended = await streamed(
        "/v1/messages",
        event("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 0}}),
        event("content_block_delta", delta={"type": "text_delta", "text": "a"})
        + event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 4}),
    )
    assert started["message"]["stop_reason"] is None
    assert started["message"]["usage"]["cache_read_input_tokens"] == 0
    assert delta == {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    assert ended["delta"] == {
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert ended["usage"]["cache_creation_input_tokens"] == 0


RESPONSE = {
    "object": "response",
    "status": "completed",
    "presence_penalty": None,
    "top_logprobs": None,
    "text": None,
    "tools": [{"type": "function", "name": "f", "parameters": {"tools": [{"type": "function"}]}}],
    "output": [
        {
            "type": "message",
            "phase": None,
            "content": [{"type": "output_text", "text": "", "annotations": None}],
        },
        {"type": "function_call", "name": "f"},
    ],
}


async def test_a_response_is_completed() -> None:
    answer = await answered("/v1/responses", RESPONSE)
    assert isinstance(answer["completed_at"], int)
    assert answer["error"] is None
    assert answer["presence_penalty"] == 0.0
    assert answer["text"] == {"format": {"type": "text"}}
    assert answer["output"][0]["content"][0]["annotations"] == []
    assert "phase" not in answer["output"][0]
    assert answer["output"][1]["status"] == "completed"
    assert answer["tools"][0]["strict"] is None


async def test_what_a_client_sent_is_not_completed() -> None:
    answer = await answered("/v1/responses", RESPONSE)
    assert answer["tools"][0]["parameters"] == {"tools": [{"type": "function"}]}


async def test_a_stored_response_is_completed_too() -> None:
    answer = await answered("/v1/responses/resp_1", RESPONSE | {"status": "in_progress"})
    assert answer["completed_at"] is None


async def test_events_of_responses_are_completed() -> None:
    created, part, text, done = await streamed(
        "/v1/responses",
        event("response.created", response={"status": "in_progress"}),
        event("response.content_part.added", part={"type": "output_text", "annotations": None}),
        event("response.output_text.delta", delta="a"),
        event("response.completed", response=RESPONSE),
    )
    assert created["response"]["completed_at"] is None
    assert part["part"]["annotations"] == []
    assert text == {"type": "response.output_text.delta", "delta": "a"}
    assert done["response"]["output"][0]["content"][0]["annotations"] == []


@pytest.mark.parametrize(
    ("path", "status", "kind", "body"),
    [
        ("/v1/completions", 200, b"application/json", b'{"usage": null}'),
        ("/v1/messages", 400, b"application/json", b'{"usage": null}'),
        ("/v1/messages", 200, b"application/json", b"no json"),
        ("/v1/messages", 200, b"application/json", b"[1]"),
        ("/v1/messages", 200, b"text/plain", b'{"usage": null}'),
        ("/v1/messages/count_tokens", 200, b"application/json", b'{"input_tokens": 3}'),
        ("/v1/messages", 200, b"text/event-stream", b"event: message_start\ndata: [\n\n"),
        ("/v1/messages", 200, b"text/event-stream", b": a comment\n\ndata: x\n\n"),
    ],
)
async def test_anything_else_passes(path: str, status: int, kind: bytes, body: bytes) -> None:
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), (b"content-length", b"%d" % len(body))],
    }
    messages: list[dict[str, Any]] = [start, {"type": "http.response.body", "body": body}]
    assert await sent(path, *messages) == messages


async def test_a_body_in_pieces_is_completed_as_a_whole() -> None:
    pieces: list[dict[str, Any]] = [
        {"type": "http.response.body", "body": b'{"usage"', "more_body": True},
        {"type": "http.response.body", "body": b": null}", "more_body": False},
    ]
    _, body = await sent("/v1/messages", JSON_START, *pieces)
    assert json.loads(body["body"])["stop_sequence"] is None
