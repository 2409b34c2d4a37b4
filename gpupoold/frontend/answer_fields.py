"""Answers and errors in the forms of their specifications: required fields, Anthropic's errors.

Anthropic's Messages and Open Responses list every field of an answer as required, most of them
nullable; clients that are generated from the specification refuse an answer without them. The
tables below have the value of each such field, by the place of its object, for a whole answer and
for the events of a stream. A field is added where it is absent, and replaced or left out where it
is null and may not be.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import Send

Object = dict[str, Any]
Fields = Mapping[str, Any]
"""Values by name; a function computes the value of its object."""
_NOT_NULL = object()  # left out if null
Table = Mapping[str, Fields]
"""Fields by the place of their objects: names with dots; ``name[type]`` is an object of this type,
or all such objects of an array."""

_PATH = "/v1/messages"
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    529: "overloaded_error",
}
_ERROR_CHUNK = 'data: {"error"'
_ERROR_EVENT = "event: error\ndata: "


def _within(place: str, table: Table) -> Table:
    return {f"{place}.{inner}" if inner else place: fields for inner, fields in table.items()}


def _kinds(name: str, fields_of_kind: Table) -> Table:
    return {f"{name}{kind}": fields for kind, fields in fields_of_kind.items()}


def _completed_at(response: Object) -> int | None:
    return int(time.time()) if response.get("status") == "completed" else None


_CONTENT_BLOCKS: Table = {
    "[text]": {"citations": None},
    "[tool_use]": {"caller": {"type": "direct"}},
    "[thinking]": {"signature": ""},
}
# Without details of the cache all tokens of the prompt are input tokens.
_DELTA_USAGE: Fields = {
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens_details": None,
    "server_tool_use": None,
}
_USAGE: Fields = {
    **_DELTA_USAGE,
    "cache_creation": None,
    "inference_geo": None,
    "service_tier": "standard",
}
_MESSAGE: Table = {
    "": {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None},
    "usage": _USAGE,
    **_kinds("content", _CONTENT_BLOCKS),
}
_MESSAGE_EVENTS: Mapping[str, Table] = {
    "message_start": _within("message", _MESSAGE),
    "content_block_start": _kinds("content_block", _CONTENT_BLOCKS),
    "message_delta": {
        "delta": {"stop_sequence": None, "stop_details": None, "container": None},
        "usage": _DELTA_USAGE,
    },
}

_PARTS: Table = {"[output_text]": {"annotations": [], "logprobs": []}}
_ITEMS: Table = {
    "[function_call]": {"status": "completed"},
    "[message]": {"phase": _NOT_NULL},
    **_kinds("[message].content", _PARTS),
}
_RESPONSE: Table = {
    "": {
        "completed_at": _completed_at,
        "error": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
        "metadata": {},
    },
    "tools[function]": {"description": None, "parameters": None, "strict": None},
    **_kinds("output", _ITEMS),
}
_LIFECYCLE = ("queued", "created", "in_progress", "completed", "incomplete", "failed")
_RESPONSE_EVENTS: Mapping[str, Table] = {
    **{f"response.{state}": _within("response", _RESPONSE) for state in _LIFECYCLE},
    **{f"response.output_item.{step}": _kinds("item", _ITEMS) for step in ("added", "done")},
    **{f"response.content_part.{step}": _kinds("part", _PARTS) for step in ("added", "done")},
}

CHOICES: Table = {
    "": {"service_tier": _NOT_NULL},
    "usage": {"completion_tokens_details": _NOT_NULL, "prompt_tokens_details": _NOT_NULL},
    "choices.message": {"annotations": _NOT_NULL, "function_call": _NOT_NULL},
}
"""For OpenAI's chats and completions, which ``large_answers.py`` completes."""

_JSON = b"application/json"
_RESPONSES = "/v1/responses"
_TABLES: Mapping[str, tuple[Table, Mapping[str, Table]]] = {
    "/v1/messages": (_MESSAGE, _MESSAGE_EVENTS),
    _RESPONSES: (_RESPONSE, _RESPONSE_EVENTS),
}


def completing(path: str, send: Send) -> Send:
    """Return ``send`` for an application; it completes answers to a request for ``path``."""
    tables = _TABLES.get(_RESPONSES if path.startswith(f"{_RESPONSES}/") else path)
    if tables is None:
        return send
    table, events = tables
    is_stream = False

    async def send_events(message: Any) -> None:
        nonlocal is_stream
        if message["type"] == "http.response.start":
            is_stream = _content_type(message).startswith(b"text/event-stream")
        elif is_stream and message.get("body"):
            message = {**message, "body": complete_events(message["body"], events)}
        await send(message)

    return rewriting(
        send_events,
        lambda start: start["status"] == 200 and _content_type(start).startswith(_JSON),
        lambda _, body: _completed(body, table),
    )


def rewriting(
    send: Send, is_rewritten: Callable[[Any], bool], rewrite: Callable[[int, bytes], bytes]
) -> Send:
    """Return ``send`` for an application; some answers get another body, which is JSON.

    An answer whose start ``is_rewritten`` is held back until its end. ``rewrite`` takes the status
    and the body.
    """
    start: Any = None
    body = bytearray()

    async def send_rewritten(message: Any) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and is_rewritten(message):
            start = message
        elif start is None:
            await send(message)
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                payload = rewrite(start["status"], bytes(body))
                headers = [
                    (name, value)
                    for name, value in start.get("headers", ())
                    if name.lower() not in (b"content-length", b"content-type")
                ]
                length = b"%d" % len(payload)
                headers += [(b"content-type", _JSON), (b"content-length", length)]
                await send({**start, "headers": headers})
                await send({"type": "http.response.body", "body": payload})

    return send_rewritten


def complete(answer: Object, table: Table) -> None:
    for place, fields in table.items():
        for found in _objects(answer, place.split(".") if place else []):
            _fill(found, fields)


def _fill(found: Object, fields: Fields) -> None:
    for name, value in fields.items():
        if found.get(name) is None:
            if value is _NOT_NULL:
                found.pop(name, None)
            else:
                found[name] = value(found) if callable(value) else value


def complete_events(body: bytes, events: Mapping[str, Table]) -> bytes:
    """Add the fields of ``events`` to the server-sent events in a piece of a stream."""
    return b"\n\n".join(_complete_event(event, events) for event in body.split(b"\n\n"))


def _completed(text: bytes, table: Table) -> bytes:
    """Return JSON with the fields of a table; the same text if it is no object."""
    try:
        answer = json.loads(text)
        if not isinstance(answer, dict):
            return text
        complete(answer, table)
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
    except ValueError:
        return text


def _complete_event(event: bytes, events: Mapping[str, Table]) -> bytes:
    head, separator, data = event.partition(b"\ndata: ")
    table = events.get(head.removeprefix(b"event: ").decode("latin-1")) if separator else None
    return event if table is None else head + separator + _completed(data, table)


def _content_type(start: Any) -> bytes:
    return dict(start.get("headers", ())).get(b"content-type", b"")


def _objects(value: Any, place: list[str]) -> Iterator[Object]:
    if not place:
        if isinstance(value, dict):
            yield value
        return
    name, _, kind = place[0].partition("[")
    inner = value.get(name) if isinstance(value, dict) else None
    for one in inner if isinstance(inner, list) else [inner]:
        if not kind or (isinstance(one, dict) and one.get("type") == kind[:-1]):
            yield from _objects(one, place[1:])


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error, whose type follows from the HTTP status."""
    other = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return {"type": "error", "error": {"type": _TYPES.get(status, other), "message": message}}


def with_errors_of(path: str, send: Send) -> Send:
    """Return ``send`` for an application whose errors get the form of the API of ``path``."""
    if not path.startswith(_PATH):
        return send

    def rewrite(status: int, body: bytes) -> bytes:
        return json.dumps(error_body(status, _message_of(body))).encode("ascii")

    return rewriting(send, lambda start: start["status"] >= HTTPStatus.BAD_REQUEST, rewrite)


def _message_of(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, TypeError, LookupError):
        return text
    return str(message)


def name_errors_of_streams(handler: Any) -> None:
    """Make vLLM's handler of ``/v1/messages`` end a failed stream with the reason.

    The handler reads the chunks of a chat completion: it takes an error for a chunk and reports the
    errors of the chunk's validation.
    """
    handler.message_stream_converter = _with_reasons(handler.message_stream_converter)


def _with_reasons(convert: Callable[..., AsyncGenerator[str, None]]) -> Callable[..., Any]:
    async def converted(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        failures: list[dict[str, Any]] = []

        async def until_failure() -> AsyncGenerator[str, None]:
            async for chunk in chunks:
                if chunk.startswith(_ERROR_CHUNK):
                    failures.append(json.loads(chunk.removeprefix("data: "))["error"])
                    return
                yield chunk

        async for event in convert(until_failure()):
            if event.startswith(_ERROR_EVENT):
                failures.append(json.loads(event.removeprefix(_ERROR_EVENT))["error"])
            else:
                yield event
        for failure in failures[:1]:
            status = failure.get("code") or HTTPStatus.INTERNAL_SERVER_ERROR
            body = error_body(int(status), failure["message"])
            yield f"{_ERROR_EVENT}{json.dumps(body)}\n\n"

    return converted
