"""Ids of requests: the server makes those that it works with; a client's own goes back to it.

Each HTTP request gets an id of 16 random bytes, which the answer has as ``x-request-id``. The
requests to the engine that come of it are called by that id, the second and later ones with a
number behind it. A client's own id is in what the client is sent and nowhere else.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

from gpupoold.frontend.errors import bad_request
from gpupoold.frontend.mounts import Scope, Send

MAX_CLIENT_ID_CHARS = 128

_HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rf"[!-~]{{1,{MAX_CLIENT_ID_CHARS}}}")


class RequestIds:
    """The id of one HTTP request, and those of the engine requests that come of it."""

    def __init__(self) -> None:
        self.http_id = secrets.token_hex(16)
        self._num_made = 0

    def make(self) -> str:
        """An id for the next engine request."""
        self._num_made += 1
        return self.http_id if self._num_made == 1 else f"{self.http_id}-{self._num_made}"


_current: ContextVar[RequestIds | None] = ContextVar("request_ids", default=None)


@contextlib.contextmanager
def naming(ids: RequestIds) -> Iterator[None]:
    """Take the ids of engine requests from ``ids``, within and in tasks that are begun there."""
    token = _current.set(ids)
    try:
        yield
    finally:
        _current.reset(token)


def make_engine_id() -> str:
    """An id for an engine request of the HTTP request that is being served."""
    return (_current.get() or RequestIds()).make()


def check_client_id(value: object, where: str) -> None:
    """Check an id that a client sent; ``where`` names the field or header.

    Raises:
        ApiError: 400; the id is too long, empty, or has other characters than printable ASCII.
    """
    if not isinstance(value, str) or _CLIENT_ID.fullmatch(value) is None:
        raise bad_request(
            f"{where} must be a string of 1 to {MAX_CLIENT_ID_CHARS} printable ASCII "
            "characters without spaces.",
            param="request_id",
        )


def with_id(scope: Scope, ids: RequestIds, *, body_has_id: bool) -> Scope:
    """The same request with an id for the model's API: the client's, or else ours.

    Raises:
        ApiError: 400; the client's header ``X-Request-Id`` is not an id.
    """
    sent = [value for name, value in scope["headers"] if name == _HEADER]
    for value in sent:
        check_client_id(value.decode("latin-1"), "The header `X-Request-Id`")
    if sent or body_has_id:
        return scope
    return {**scope, "headers": [*scope["headers"], (_HEADER, ids.http_id.encode())]}


def telling_id(send: Send, ids: RequestIds) -> Send:
    """``send`` that adds the server's id to the headers of an answer."""

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = _without_id(message.get("headers", ()))
            message = {**message, "headers": [*headers, (_HEADER, ids.http_id.encode())]}
        await send(message)

    return send_with_id


def _without_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [header for header in headers if header[0].lower() != _HEADER]
