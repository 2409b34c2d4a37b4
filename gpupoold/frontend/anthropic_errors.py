"""Errors of ``/v1/messages`` in Anthropic's form, from bounds, validators and engines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

from gpupoold.frontend.answer_fields import rewriting
from gpupoold.frontend.mounts import Send

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
