"""The inputs of one pooling request: their token ids, and how many are in the engine at once.

vLLM's validator tries the types of five requests on each token id, 20 µs each. So the ids, which
msgspec has validated, are left out of the body, and put back after the validation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

INPUTS_AT_ONCE = 128
"""Inputs of an HTTP request that wait or run at once, as requests of their own: to begin with
2,048 takes the event loop, and the daemon, most of a second without a pause.
"""
TokenIds = list[int] | list[list[int]]

_SMALL_BYTES = 4_096
_STAND_IN = msgspec.Raw(b"[0]")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_one_input = msgspec.json.Decoder(list[int])
_inputs = msgspec.json.Decoder(list[list[int]])


def read_token_ids(text: msgspec.Raw) -> TokenIds | None:
    """Return token ids, of one input or of several; None for any other value."""
    for decoder in (_one_input, _inputs):
        with contextlib.suppress(msgspec.ValidationError):
            found: TokenIds = decoder.decode(text)
            return found
    return None


def without_token_ids(body: bytes) -> tuple[bytes, TokenIds | None]:
    """Return a body without the token ids of ``input``, and the ids; None if there are few."""
    fields = _fields.decode(body)
    text = fields.get("input")
    if text is None or len(memoryview(text)) <= _SMALL_BYTES:
        return body, None
    token_ids = read_token_ids(text)
    if token_ids is None:
        return body, None
    return msgspec.json.encode(fields | {"input": _STAND_IN}), token_ids


class _Inputs:
    def __init__(self, token_ids: TokenIds | None, num_at_once: int) -> None:
        self.token_ids = token_ids
        self.slots = asyncio.Semaphore(num_at_once)


_current: ContextVar[_Inputs | None] = ContextVar("pooling_inputs", default=None)


@contextlib.contextmanager
def pooling_inputs(token_ids: TokenIds | None, num_at_once: int) -> Iterator[None]:
    """Serve the inputs of one HTTP request in the context, and in its tasks."""
    token = _current.set(_Inputs(token_ids, num_at_once))
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.asynccontextmanager
async def input_slot() -> AsyncIterator[None]:
    """Wait until one more input of the HTTP request may begin."""
    inputs = _current.get()
    if inputs is None:
        yield
        return
    async with inputs.slots:
        yield


def put_token_ids_back(begin: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the first function of vLLM's pooling handlers, which gets the validated request."""

    async def begun(processor: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = _current.get()
        if inputs is not None and inputs.token_ids is not None:
            request.input = inputs.token_ids
        return await begin(processor, request, *args, **kwargs)

    return begun
