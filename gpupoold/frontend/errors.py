"""Errors of the router, in the forms that vLLM 0.32.0 uses."""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from gpupoold.domain import ModelState
from gpupoold.frontend.client_texts import for_clients
from gpupoold.wire.messages import AdmissionAnswer, ServedModel

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_MAX_NAME_CHARS = 200
_RETRY_STARTING_S = 1.0
_RETRY_STOPPING_S = 10.0
_RETRY_NO_ROOM_S = 1.0
_RETRY_GRAMMAR_S = 2.0


class ApiError(Exception):
    """An error answer with HTTP status and body.

    ``kind`` is the body's ``type``, ``code`` its ``code`` if different from the status, ``param``
    the wrong field, ``retry_after_s`` becomes the ``Retry-After`` header, ``more_headers`` are
    further headers.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.more_headers = more_headers

    def body(self) -> dict[str, object]:
        """Return the JSON body in OpenAI's form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code or self.status,
            }
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.status == HTTPStatus.UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        if self.retry_after_s is None:
            return list(self.more_headers)
        seconds = max(1, math.ceil(self.retry_after_s))
        return [(b"retry-after", str(seconds).encode()), *self.more_headers]


def allow_header(methods: Sequence[str]) -> tuple[bytes, bytes]:
    """Return the header ``Allow`` of a path with these methods."""
    return b"allow", ", ".join(sorted((*methods, "OPTIONS"))).encode()


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return 400: the request itself is wrong."""
    return ApiError(400, "BadRequestError", message, param=param)


def not_understood(error: Exception) -> ApiError:
    """400: the API fell over a request before any work began."""
    reason = for_clients(_short(str(error.__cause__ or error)))
    return bad_request(f"The request cannot be understood: {reason}")


def too_large(max_body_bytes: int) -> ApiError:
    """413: the body is over the daemon's limit."""
    return ApiError(
        413,
        "RequestTooLargeError",
        f"The request body is larger than the limit of {max_body_bytes} bytes.",
    )


def needs_too_much(max_bytes: int) -> ApiError:
    """Return 413: the body, times its answers, or the answer, exceeds the bytes in flight."""
    return ApiError(
        413,
        "RequestTooLargeError",
        "The request body, counted `n` times, with what its answer needs, is larger than the "
        f"{max_bytes:,} bytes that may be in flight at once.",
    )


def no_room(max_bytes: int) -> ApiError:
    """Return 429: other requests in flight have too many bytes."""
    return over_rate(
        f"The requests in flight have nearly {max_bytes:,} bytes already: there is no room for "
        "this one now.",
        _RETRY_NO_ROOM_S,
    )


def too_slow(timeout_s: float) -> ApiError:
    """Return 408: the body does not arrive completely."""
    return ApiError(
        408, "RequestTimeoutError", f"The request body has not come within {timeout_s:g} s."
    )


def misdirected(host: str) -> ApiError:
    """Return 421: a request without a key names a host that is not this server."""
    return ApiError(
        421,
        "MisdirectedRequestError",
        f"The Host header is {_short(host)!r}, which this server does not answer without an API "
        "key. Use localhost or 127.0.0.1, or name the host in access.host_names.",
    )


def foreign_origin(origin: str) -> ApiError:
    """Return 403: a request without a key comes from another site's page."""
    return ApiError(
        403,
        "ForbiddenError",
        f"The Origin header is {_short(origin)!r}: pages of other sites have no access without "
        "an API key. To give the pages of an origin access, add it to access.allowed_origins.",
    )


def no_such_path(method: str, path: str) -> ApiError:
    """Return 404: the path is unknown."""
    message = f"There is no {method} {_short(path)} here. The API is below /v1, see /openapi.json."
    return ApiError(404, "NotFoundError", message)


def not_of_this_kind(model: str, path: str, served: Iterable[str]) -> ApiError:
    """Return 400: a model that embeds cannot chat, for example."""
    return bad_request(
        f"The model `{model}` does not serve {path}; the model serves {', '.join(served)}.",
        param="model",
    )


def method_not_allowed(method: str, path: str, methods: Sequence[str]) -> ApiError:
    """Return 405: the path exists for other methods."""
    return ApiError(
        405,
        "MethodNotAllowedError",
        f"{_short(path)} does not take {method}, but {', '.join(methods)}.",
        more_headers=[allow_header(methods)],
    )


def unread_encoding(coding: str) -> ApiError:
    """Return 415: the body is compressed."""
    return ApiError(
        415,
        "UnsupportedMediaTypeError",
        f"Content-Encoding {coding} is not supported: send the body as it is, without compression.",
        more_headers=[(b"accept-encoding", b"identity")],
    )


def no_such_response(response_id: str) -> ApiError:
    """404: no mounted model stored a response of this id."""
    return ApiError(
        404, "NotFoundError", f"Response with id '{_short(response_id)}' not found.", param="id"
    )


def no_such_model(name: str, known: Iterable[str]) -> ApiError:
    """Return 404: the name is neither a model nor an alias of the caller's ``known`` models.

    The message has the nearest name.
    """
    near = [] if len(name) > _MAX_NAME_CHARS else difflib.get_close_matches(name, known, n=3)
    hint = (
        f"Did you mean {', '.join(f'`{other}`' for other in near)}?"
        if near
        else "GET /v1/models lists the models served here."
    )
    message = f"The model `{_short(name)}` does not exist. {hint}"
    return ApiError(404, "NotFoundError", message, param="model", code="model_not_found")


class NotYet(ApiError):
    """503: the model is being loaded or mounted; ``model`` is "" before any model is known."""

    def __init__(self, message: str, model: str, retry_after_s: float) -> None:
        param = "model" if model else None
        super().__init__(
            503, "ServiceUnavailableError", message, param=param, retry_after_s=retry_after_s
        )
        self.model = model


def not_ready(model: ServedModel) -> ApiError:
    """503: the model is known but cannot answer now."""
    reason = f": {model.reason}" if model.reason else ""
    message = f"The model `{model.name}` is {model.state}{reason}"
    retry_after_s = max(model.retry_after_s, model.retry_at_s - time.monotonic())
    if model.state in (ModelState.LOADING, "starting"):
        return NotYet(message, model.parent or model.name, retry_after_s)
    return ApiError(
        503, "ServiceUnavailableError", message, param="model", retry_after_s=retry_after_s
    )


def not_admitted(admission: AdmissionAnswer) -> ApiError:
    """Return 429 or 503: the daemon refuses the request now.

    vLLM has no 429 of its own. OpenAI's clients recognise the error by its ``code``, Anthropic's by
    its ``type``.
    """
    if admission.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    else:
        kind, code = "ServiceUnavailableError", None
    return ApiError(
        admission.status, kind, admission.message, code=code, retry_after_s=admission.retry_after_s
    )


def too_many_grammars() -> ApiError:
    """Return 429: new grammars arrive faster than the checker can handle."""
    return ApiError(
        429,
        "rate_limit_error",
        "Too many new grammars (schemas, patterns, choices, tools) wait to be checked.",
        code="rate_limit_exceeded",
        retry_after_s=_RETRY_GRAMMAR_S,
    )


def grammar_unchecked(reason: str) -> ApiError:
    """Return 503: the grammar could not be checked now."""
    return ApiError(
        503,
        "ServiceUnavailableError",
        f"The grammar cannot be checked now: {for_clients(reason) or 'the checker has ended'}.",
        retry_after_s=_RETRY_GRAMMAR_S,
    )


def metrics_unavailable() -> ApiError:
    """Return 503: the daemon has not sent its metrics in time."""
    return ApiError(
        503,
        "ServiceUnavailableError",
        "The daemon has not sent its metrics in time.",
        retry_after_s=_RETRY_STARTING_S,
    )


def rates_unavailable() -> ApiError:
    """Return 503: the daemon has not sent the key's remaining rates in time."""
    return ApiError(
        503,
        "ServiceUnavailableError",
        "The daemon has not confirmed the limits of this API key in time.",
        retry_after_s=_RETRY_STARTING_S,
    )


def unauthorised(message: str) -> ApiError:
    """Return 401: no key, or no valid key. The message never repeats the key."""
    return ApiError(401, "invalid_request_error", message, code="invalid_api_key")


def not_permitted(message: str) -> ApiError:
    """403: the key is valid, but not for this."""
    return ApiError(403, "invalid_request_error", message, code="insufficient_permissions")


def over_rate(message: str, retry_after_s: float) -> ApiError:
    """Return 429: the key has used up its rate."""
    return ApiError(
        429, "rate_limit_error", message, code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def starting() -> ApiError:
    """503: this frontend has just been started and knows no models yet."""
    return NotYet("The server is starting.", "", _RETRY_STARTING_S)


STOPPING = "the server is stopping"
"""What clients read, of answers that end and of requests that are not taken any more."""


def stopping() -> ApiError:
    """Return 503: the server ends answers in progress, and takes no more requests."""
    return ApiError(
        503,
        "ServiceUnavailableError",
        STOPPING,
        retry_after_s=_RETRY_STOPPING_S,
        more_headers=[(b"connection", b"close")],
    )


async def send_json(
    send: Send,
    status: int,
    body: object,
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    with_body: bool = True,
) -> None:
    """Answer with a JSON body (left out for HEAD requests)."""
    # Python's encoder escapes lone surrogates, which a model's name from a client may contain.
    payload = json.dumps(body).encode("ascii")
    length = (b"content-length", str(len(payload)).encode())
    all_headers = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": payload if with_body else b""})


async def send_empty(send: Send, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Answer with 204."""
    await send({"type": "http.response.start", "status": 204, "headers": list(headers)})
    await send({"type": "http.response.body", "body": b""})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body(), error.headers())


def _short(text: str) -> str:
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."
