"""Ids of requests, and the name of the model in an answer.

The server creates its own ids; a client's id is only returned to the client.

Each HTTP request gets an id of 16 random bytes, sent as ``x-request-id``. Its engine requests use
that id, the second and later ones with a number appended. A client's own id appears only in the
client's answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, MutableMapping
from typing import Any

from gpupoold.frontend.errors import bad_request
from gpupoold.frontend.mounts import Scope, Send
from gpupoold.frontend.request_bounds import RequestLocal

MAX_CLIENT_ID_CHARS = 128

_HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rf"[!-~]{{1,{MAX_CLIENT_ID_CHARS}}}")


class RequestIds:
    """The id of one HTTP request, and the ids of its engine requests."""

    def __init__(self) -> None:
        self.http_id = secrets.token_hex(16)
        self._num_made = 0

    def make(self) -> str:
        """An id for the next engine request."""
        self._num_made += 1
        return self.http_id if self._num_made == 1 else f"{self.http_id}-{self._num_made}"


request_ids: RequestLocal[RequestIds] = RequestLocal("request_ids")
answer_name: RequestLocal[str] = RequestLocal("answer_name")
"""The name of the model in the answer: the name in the request, of a model, an alias, a preset or
an adapter.
"""


def make_engine_id() -> str:
    """Return an id for an engine request of the present HTTP request."""
    return (request_ids.get() or RequestIds()).make()


def name_responses(serving: Any) -> None:
    """Give answers of vLLM's Responses API the server's id, where vLLM would take a random one."""
    create = serving.create_responses

    async def create_named(request: Any, *args: Any, **kwargs: Any) -> Any:
        ids = request_ids.get()
        if ids is not None and "request_id" not in request.model_fields_set:
            request.request_id = f"resp_{ids.http_id}"
        return await create(request, *args, **kwargs)

    serving.create_responses = create_named


def name_as_requested(models: Any) -> None:
    """Make vLLM's list of served names return the name in the request.

    vLLM names an alias's model, of which a preset is one here.
    """
    name_of: Callable[..., str] = models.model_name
    models.model_name = lambda lora_request=None: answer_name.get() or name_of(lora_request)


def sample_number(engine_id: str) -> int:
    """Return the number of an engine request among the samples of one prompt.

    vLLM puts the number before the id of a request with several samples.
    """
    number, found, _ = engine_id.partition("_")
    return int(number) if found else 0


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


def sending_id(send: Send, ids: RequestIds) -> Send:
    """Return ``send`` with the server's id added to the headers of an answer."""

    async def send_with_id(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [
                header for header in message.get("headers", ()) if header[0].lower() != _HEADER
            ]
            message = {**message, "headers": [*headers, (_HEADER, ids.http_id.encode())]}
        await send(message)

    return send_with_id
