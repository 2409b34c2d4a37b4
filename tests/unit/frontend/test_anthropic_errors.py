"""Errors of ``/v1/messages`` in Anthropic's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from gpupoold.frontend.answer_fields import (
    error_body,
    name_errors_of_streams,
    with_errors_of,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert error_body(status, "m") == {"type": "error", "error": {"type": kind, "message": "m"}}


def passed_on(status: int, *pieces: bytes) -> tuple[dict[str, Any], bytes]:
    """The head and the body that a client gets of an application's answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        shaped = with_errors_of("/v1/messages", send)
        headers = [(b"content-type", b"text/plain"), (b"retry-after", b"3")]
        await shaped({"type": "http.response.start", "status": status, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            await shaped({"type": "http.response.body", "body": piece, "more_body": more})

    asyncio.run(run())
    return sent[0], b"".join(message["body"] for message in sent[1:])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((b'{"error": {"message": "no', b'pe", "type": "Bad Request"}}'), "nope"),
        ((b'{"type": "error", "error": {"type": "BadRequestError", "message": "x"}}',), "x"),
        ((b"Internal Server Error",), "Internal Server Error"),
        ((b"[1]",), "[1]"),
        ((b"\xff",), "\ufffd"),
    ],
)
def test_errors_of_any_form(pieces: tuple[bytes, ...], message: str) -> None:
    start, body = passed_on(400, *pieces)
    assert json.loads(body) == error_body(400, message)
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(body)).encode()
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"retry-after"] == b"3"


def test_answers_pass_unchanged() -> None:
    start, body = passed_on(200, b'{"error": 1, ', b'"x": 2}')
    assert (start["status"], body) == (200, b'{"error": 1, "x": 2}')


def streamed(*chunks: str) -> list[str]:
    """The events of a handler like vLLM's, which fails on a chunk that is no chunk."""

    async def convert(given: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async for chunk in given:
            if "choices" in chunk:
                yield "event: content_block_delta\ndata: {}\n\n"
            else:
                inner = {"type": "internal_error", "message": "Invalid data"}
                yield f"event: error\ndata: {json.dumps({'type': 'error', 'error': inner})}\n\n"

    async def given() -> AsyncGenerator[str, None]:
        for chunk in chunks:
            yield chunk

    async def run() -> list[str]:
        handler = SimpleNamespace(message_stream_converter=convert)
        name_errors_of_streams(handler)
        return [event async for event in handler.message_stream_converter(given())]

    return asyncio.run(run())


def test_a_failed_stream_ends_with_the_reason() -> None:
    error = {"error": {"message": "the device is gone", "type": "X", "code": 503}}
    events = streamed('data: {"choices": []}\n\n', f"data: {json.dumps(error)}\n\n", "data: [DONE]")
    assert len(events) == 2
    assert json.loads(events[1].removeprefix("event: error\ndata: ")) == error_body(
        503, "the device is gone"
    )


def test_an_error_of_the_handler_is_the_server_s() -> None:
    [event] = streamed("data: nothing")
    assert json.loads(event.partition("data: ")[2]) == error_body(500, "Invalid data")
