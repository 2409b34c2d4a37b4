"""Large answers of vLLM's handlers, made off the event loop.

vLLM makes the log-probabilities of an answer in one function, then converts and serialises the
whole answer, all on the event loop: 13 MB take seconds. Here the functions run in a thread once the
handler has the rest of the answer, and ``PiecewiseJson`` serialises the answer. The objects of a
chat, 500 bytes for an entry, exist only while their part of the answer is serialised.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import vllm.entrypoints.openai.chat_completion.api_router as chat_router
import vllm.entrypoints.openai.completion.api_router as completion_router
import vllm.entrypoints.serve.tokenize.api_router as tokenize_router
from pydantic import BaseModel, PrivateAttr
from pydantic_core import to_json
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs, CompletionResponse

from gpupoold.frontend.answer_fields import CHOICES, complete

_NUM_SMALL = 1_000
"""Entries, or token ids, up to which an answer is made as vLLM makes it."""
_NUM_POSITIONS = 16
"""Positions of a chat that are made at one time."""

_DIVIDED = frozenset({ChatCompletionLogProbs, CompletionLogProbs})
# The handlers in the state of vLLM's application, the function that answers a request, the function
# that makes log-probabilities, and what the latter returns.
_HANDLERS: tuple[tuple[str, str, str, type[BaseModel]], ...] = (
    (
        "openai_serving_completion",
        "create_completion",
        "_create_completion_logprobs",
        CompletionLogProbs,
    ),
    (
        "openai_serving_chat",
        "create_chat_completion",
        "_create_chat_logprobs",
        ChatCompletionLogProbs,
    ),
    (
        "openai_serving_chat_batch",
        "create_batch_chat_completion",
        "_create_chat_logprobs",
        ChatCompletionLogProbs,
    ),
)

_PIECE_BYTES = 65_536
_NUM_ITEMS = 16
"""Items of a list that are serialised in one call; an item has up to some hundred values."""
_NUM_NUMBERS = 10_000


@dataclass(frozen=True)
class _Unmade:
    """Log-probabilities still to be made; ``placed``, without any, is a part of the answer.

    ``make`` takes the ``token_ids`` and ``top_logprobs`` of positions, and makes theirs.
    """

    placed: BaseModel
    make: Callable[..., BaseModel]
    token_ids: Sequence[int]
    top_logprobs: Sequence[Any]

    async def fill(self) -> None:
        """Make the log-probabilities; those of a chat, objects, are made when they are sent."""
        if isinstance(self.placed, ChatCompletionLogProbs):
            self.placed.content = Parts(self._parts())
            return
        made = await asyncio.to_thread(
            self.make, token_ids=self.token_ids, top_logprobs=self.top_logprobs
        )
        for name in type(made).model_fields:
            setattr(self.placed, name, getattr(made, name))

    def _parts(self) -> Iterator[list[Any]]:
        for begin in range(0, len(self.top_logprobs), _NUM_POSITIONS):
            rows = slice(begin, begin + _NUM_POSITIONS)
            made = self.make(token_ids=self.token_ids[rows], top_logprobs=self.top_logprobs[rows])
            yield getattr(made, "content", None) or []


@dataclass(frozen=True)
class _Large:
    """An answer that is not to be converted as a whole."""

    answer: dict[str, Any]


class _LargeCompletion(CompletionResponse):  # type: ignore[misc, unused-ignore]
    _answer: dict[str, Any] = PrivateAttr()

    def model_dump(self, **_: Any) -> Any:
        return _Large(self._answer)


class _LargeChat(ChatCompletionResponse):  # type: ignore[misc, unused-ignore]
    _answer: dict[str, Any] = PrivateAttr()

    def model_dump(self, **_: Any) -> Any:
        return _Large(self._answer)


@dataclass(frozen=True, slots=True)
class Parts:
    """A list that is made while it is serialised, from lists that follow each other; once.

    A serialiser in C or Rust holds the interpreter's lock for the whole of a value: 13 MB take it
    up to a second.
    """

    parts: Iterator[list[Any]]


class PiecewiseJson(JSONResponse):
    """An answer that is serialised while it is sent, in a thread, and in one piece if it is small.

    ``divided`` are the types of pydantic models whose fields may be long lists; all other models
    are serialised whole.
    """

    divided: frozenset[type] = frozenset()

    def render(self, content: Any) -> bytes:
        self._further = _joined(json_pieces(content, self.divided))
        return next(self._further)

    def render_whole(self, content: Any) -> bytes:
        """Serialise in one piece, as vLLM does."""
        self._further = iter(())
        return super().render(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        second = next(self._further, None)
        if second is None:
            await super().__call__(scope, receive, send)
            return
        del self.headers["content-length"]
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        piece: bytes | None = second
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await asyncio.to_thread(next, self._further, None)
        await send({"type": "http.response.body", "body": b""})


def json_pieces(value: Any, divided: frozenset[type] = frozenset()) -> Iterator[bytes]:
    """Yield a value's JSON; a list or an object is divided, unless it is small.

    Models of the types ``divided`` must have no serialiser of their own.
    """
    if isinstance(value, BaseModel) and type(value) in divided:
        yield from _object_pieces(value, divided)
    elif isinstance(value, dict):
        yield from _object_pieces(value.items(), divided)
    elif isinstance(value, np.ndarray):
        yield from json_pieces(value.tolist(), divided)
    elif isinstance(value, Parts):
        yield from _bracketed(_joined_items(part, _NUM_ITEMS) for part in value.parts)
    elif isinstance(value, list) and value:
        yield from _list_pieces(value, divided)
    else:
        yield _whole(value)


def _object_pieces(items: Iterable[tuple[Any, Any]], divided: frozenset[type]) -> Iterator[bytes]:
    before = b"{"
    for name, value in items:
        yield before + _whole(str(name)) + b":"
        yield from json_pieces(value, divided)
        before = b","
    yield b"}" if before == b"," else b"{}"


def _list_pieces(values: list[Any], divided: frozenset[type]) -> Iterator[bytes]:
    if _is_nested(values[0], divided):
        yield from _bracketed(json_pieces(value, divided) for value in values)
    else:
        number = _NUM_NUMBERS if isinstance(values[0], int | float) else _NUM_ITEMS
        yield from _bracketed([_joined_items(values, number)])


def _bracketed(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an array, given the pieces of its items or of several of them."""
    before = b"["
    for pieces in items:
        yield before
        yield from pieces
        before = b","
    yield b"]" if before == b"," else b"[]"


def _joined_items(values: list[Any], number: int) -> Iterator[bytes]:
    """Yield the items of a list without brackets, ``number`` of them in each piece."""
    for begin in range(0, len(values), number):
        piece = _whole(values[begin : begin + number])[1:-1]
        yield b"," + piece if begin else piece


def _is_nested(value: Any, divided: frozenset[type]) -> bool:
    """Return whether the items of a list, of which ``value`` is the first, may be long."""
    if isinstance(value, dict):
        return any(
            isinstance(inner, list | np.ndarray) or type(inner) in divided
            for inner in value.values()
        )
    return isinstance(value, list) or type(value) in divided


def _whole(value: Any) -> bytes:
    return to_json(value, by_alias=False, inf_nan_mode="null")


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield at least one piece, and pieces of at least ``_PIECE_BYTES`` except for the last."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


class AnswerJson(PiecewiseJson):
    """The response class of vLLM's routers: large answers in pieces, others as vLLM does."""

    divided = _DIVIDED

    def render(self, content: Any) -> bytes:
        if isinstance(content, _Large):
            return super().render(content.answer)
        if isinstance(content, dict):
            if len(content.get("tokens") or ()) > _NUM_SMALL:
                return super().render(content)
            complete(content, CHOICES)
        return self.render_whole(content)


_unmade: ContextVar[list[_Unmade] | None] = ContextVar("unmade_logprobs", default=None)


def make_large_answers_apart(state: Any) -> None:
    """Change the handlers in the state of vLLM's application, and its routers."""
    for router in (chat_router, completion_router, tokenize_router):
        router.JSONResponse = AnswerJson
    for handler_name, answer_name, logprobs_name, kind in _HANDLERS:
        handler = getattr(state, handler_name, None)
        if handler is not None:
            setattr(handler, logprobs_name, _postponed(getattr(handler, logprobs_name), kind))
            setattr(handler, answer_name, _completed(getattr(handler, answer_name)))


def _postponed(make: Callable[..., Any], kind: type[BaseModel]) -> Callable[..., Any]:
    """Return vLLM's function that makes log-probabilities, for later if there are many."""

    def postponed(token_ids: Sequence[int], top_logprobs: Sequence[Any], **kwargs: Any) -> Any:
        unmade = _unmade.get()
        if unmade is None or _num_entries(top_logprobs) <= _NUM_SMALL:
            return make(token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
        placed = kind()
        unmade.append(_Unmade(placed, functools.partial(make, **kwargs), token_ids, top_logprobs))
        return placed

    return postponed


def _completed(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return vLLM's function that answers a request, with all postponed parts.

    A stream is returned before its parts are made, so none of these is postponed.
    """

    async def completed(*args: Any, **kwargs: Any) -> Any:
        unmade: list[_Unmade] = []
        token = _unmade.set(unmade)
        try:
            made = await answer(*args, **kwargs)
        finally:
            _unmade.reset(token)
        if not isinstance(made, ChatCompletionResponse | CompletionResponse):
            return made  # a stream or an error
        is_large = bool(unmade) or _num_prompt_entries(made) > _NUM_SMALL
        while unmade:  # no part stays in the list: contexts of ended tasks have it
            await unmade.pop().fill()
        return _as_large(made) if is_large else made

    return completed


def _as_large(answer: ChatCompletionResponse | CompletionResponse) -> BaseModel:
    """Return a completed answer as objects of JSON, with its log-probabilities as they are."""
    choices = [dict(choice) for choice in answer.choices]
    for choice in choices:
        if "message" in choice:
            choice["message"] = choice["message"].model_dump()
    kind = _LargeCompletion if isinstance(answer, CompletionResponse) else _LargeChat
    large = kind.model_construct()
    large._answer = {**dict(answer), "choices": choices, "usage": answer.usage.model_dump()}
    complete(large._answer, CHOICES)
    return large


def _num_prompt_entries(answer: ChatCompletionResponse | CompletionResponse) -> int:
    if isinstance(answer, ChatCompletionResponse):
        return _num_entries(answer.prompt_logprobs or ())
    return sum(_num_entries(choice.prompt_logprobs or ()) for choice in answer.choices)


def _num_entries(positions: Sequence[Mapping[int, Any] | None]) -> int:
    """Return about how many entries log-probabilities have: the last position has the most."""
    return len(positions) * len(positions[-1] or ()) if positions else 0
