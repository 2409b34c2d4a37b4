"""Errors of the router, in the forms that vLLM 0.32.0 uses."""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Send

from gpupoold.domain import ModelState
from gpupoold.wire.messages import AdmissionAnswer, ModelList, RequestsFailed, ServedModel

_MAX_NAME_CHARS = 200
RETRY_STARTING_S = 1.0


# The ``type`` of an error's body, and its ``code`` if different from the status. OpenAI's clients
# recognise 429, which vLLM has not, by the code, Anthropic's by the type.
_FORMS: dict[int, tuple[str, str | None]] = {
    400: ("BadRequestError", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("ForbiddenError", None),
    404: ("NotFoundError", None),
    405: ("MethodNotAllowedError", None),
    408: ("RequestTimeoutError", None),
    409: ("ConflictError", None),
    413: ("RequestTooLargeError", None),
    415: ("UnsupportedMediaTypeError", None),
    421: ("MisdirectedRequestError", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("RequestTooLargeError", None),
    503: ("ServiceUnavailableError", None),
}


_PATH, _ADDRESS = "<path>", "<address>"
_HIDDEN = (
    # Quoted, in which a path may have spaces.
    (re.compile(r"(['\"`])(?:file://)?~?/[^'\"`\n]*\1"), rf"\1{_PATH}\1"),
    (re.compile(r"\bfile://[^\s'\"`<>]*"), _PATH),
    (re.compile(r"\b(?:tcp|ipc|unix|inproc)://[^\s'\"`<>]*"), _ADDRESS),
    (re.compile(r"(?<![\w./~<-])~?/(?!/)[^\s'\"`<>()\[\],;:]+"), _PATH),
    (re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.])"), _ADDRESS),
    (re.compile(r" at 0x[0-9a-fA-F]+"), ""),
)
_API_PATH = re.compile(r"/(?:v1|health|ready|version|metrics)(?:/|$)")


class ApiError(Exception):
    """An error answer with HTTP status and body.

    ``kind`` is the body's ``type`` and ``code`` its ``code`` if different from those of
    the status, ``param`` the wrong field, ``retry_after_s`` becomes the ``Retry-After`` header,
    ``more_headers`` are further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        form = _FORMS.get(status, _FORMS[503])
        self.kind, self.code = kind or form[0], code or form[1]
        self.param = param
        self.retry_after_s = retry_after_s
        self.more_headers = more_headers

    def body(self) -> dict[str, object]:
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
    return b"allow", ", ".join(sorted((*methods, "OPTIONS"))).encode()


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def not_understood(error: Exception) -> ApiError:
    """400: the API fell over a request before any work began."""
    reason = for_clients(short(str(error.__cause__ or error)))
    return bad_request(f"The request cannot be understood: {reason}")


def too_large(max_body_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the limit of {max_body_bytes} bytes.")


def no_such_path(method: str, path: str) -> ApiError:
    message = f"There is no {method} {short(path)} here. The API is below /v1, see /openapi.json."
    return ApiError(404, message)


def method_not_allowed(method: str, path: str, methods: Sequence[str]) -> ApiError:
    message = f"{short(path)} does not take {method}, but {', '.join(methods)}."
    return ApiError(405, message, more_headers=[allow_header(methods)])


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
    message = f"The model `{short(name)}` does not exist. {hint}"
    return ApiError(404, message, param="model", code="model_not_found")


class NotYet(ApiError):
    """503: the model is being loaded or mounted; ``model`` is "" before any model is known."""

    def __init__(self, message: str, model: str, retry_after_s: float) -> None:
        param = "model" if model else None
        super().__init__(503, message, param=param, retry_after_s=retry_after_s)
        self.model = model


def not_ready(model: ServedModel) -> ApiError:
    """503: the model is known but cannot answer now."""
    reason = f": {model.reason}" if model.reason else ""
    message = f"The model `{model.name}` is {model.state}{reason}"
    retry_after_s = max(model.retry_after_s, model.retry_at_s - time.monotonic())
    if model.state in (ModelState.LOADING, "starting"):
        return NotYet(message, model.parent or model.name, retry_after_s)
    return ApiError(503, message, param="model", retry_after_s=retry_after_s)


def over_rate(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, retry_after_s=retry_after_s)


def starting() -> ApiError:
    """503: this frontend has just been started and knows no models yet."""
    return NotYet("The server is starting.", "", RETRY_STARTING_S)


STOPPING = "the server is stopping"
"""What clients read, of answers that end and of requests that are not taken any more."""


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
    await send({"type": "http.response.start", "status": 204, "headers": list(headers)})
    await send({"type": "http.response.body", "body": b""})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body(), error.headers())


def short(text: str) -> str:
    """Return a text of a client for a message."""
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def for_clients(text: str) -> str:
    """Return a reason with ``<path>`` and ``<address>`` for those of this machine.

    Reasons come from exceptions in all processes, with paths and addresses of this machine.
    Operators read the whole text in ``gpupool events``, ``gpupool ps`` and the logs.
    """
    for pattern, shown in _HIDDEN:
        text = pattern.sub(lambda found, shown=shown: _shown(found, shown), text)  # type: ignore[misc]
    return text


def _shown(found: re.Match[str], shown: str) -> str:
    return found[0] if _API_PATH.match(found[0]) else found.expand(shown)


def fit_for_clients(message: Any) -> Any:
    """Return a message of the daemon, whose texts for clients name no detail of the server."""
    match message:
        case AdmissionAnswer() | RequestsFailed():
            return msgspec.structs.replace(message, message=for_clients(message.message))
        case ModelList():
            models = [
                msgspec.structs.replace(model, reason=for_clients(model.reason))
                for model in message.models
            ]
            return msgspec.structs.replace(message, models=models)
        case _:
            return message
