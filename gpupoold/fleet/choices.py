"""The chunks of streamed chats and completions, with choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from gpupoold.fleet.asgi import DATA, Relay, error_body

_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_THOUGHTS = ("reasoning", "reasoning_content")
# Lists of a completion's log-probabilities, all of one length.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_Field = tuple[int, str, int]
"""A field with text: the choice, the field's name, and the number of the tool call or 0."""


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    created: int | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class ChoicesRelay(Relay):
    """A relay of chunks with choices.

    Texts and lists of a continuation are cut by the number of characters and items in each field
    that the client has.
    """

    def __init__(self, *, has_logprobs: bool = False) -> None:
        """``has_logprobs``: a continuation begins after the last token with log-probabilities at
        the client, because those of repeated tokens are not known.
        """
        super().__init__()
        self._has_logprobs = has_logprobs
        self._created: int | None = None
        self._delivered: Counter[_Field] = Counter()
        self._seen: Counter[_Field] = Counter()  # in the continuation
        self._calls: Counter[int] = Counter()  # delivered tool calls of each choice
        self._ended: set[int] = set()

    @property
    def has_begun(self) -> bool:
        return bool(self._delivered or self._calls or self._ended or self._created)

    @property
    def can_continue(self) -> bool:
        # Answers with thoughts or calls lack the log-probabilities of some tokens.
        has_thoughts = any(name in _THOUGHTS for _, name, _ in self._delivered)
        return not (self._has_logprobs and (self._calls or has_thoughts))

    def begin_again(self) -> None:
        super().begin_again()
        self._seen.clear()

    def ending(self, text: str) -> bytes:
        error = error_body(HTTPStatus.SERVICE_UNAVAILABLE, text)
        return b"data: %s\n\ndata: [DONE]\n\n" % error

    def _num_kept(self, number: int) -> int | None:
        return self._delivered[number, "logprobs", 0] if self._has_logprobs else None

    def _passed(self, event: bytes) -> bytes:
        if not event.startswith(DATA):
            return event + b"\n\n"
        data = event[len(DATA) :]
        if data == _DONE:
            self.is_complete = True
            return event + b"\n\n"
        chunk = _decoder.decode(data)
        if chunk.error is not None and chunk.error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            self.lost = event + b"\n\n"
            return b""
        if self._is_continued:
            return self._rest_of(data)
        self._note(chunk)
        return event + b"\n\n"

    def _note(self, chunk: _Chunk) -> None:
        """Count the text of a chunk for the client."""
        if self._created is None:
            self._created = chunk.created
        for choice in chunk.choices or ():
            if choice.finish_reason is not None:
                self._ended.add(choice.index)
            if choice.text:
                self._delivered[choice.index, "text", 0] += len(choice.text)
            if choice.token_ids:
                self._delivered[choice.index, "token_ids", 0] += len(choice.token_ids)
            if choice.logprobs is not None:
                items = choice.logprobs.content or choice.logprobs.tokens or ()
                self._delivered[choice.index, "logprobs", 0] += len(items)
            if choice.delta is not None:
                self._note_delta(choice.index, choice.delta)

    def _note_delta(self, number: int, delta: _Delta) -> None:
        for name in _TEXTS:
            if text := getattr(delta, name):
                self._delivered[number, name, 0] += len(text)
        for call in delta.tool_calls or ():
            self._calls[number] = max(self._calls[number], call.index + 1)
            if call.function is not None and call.function.arguments:
                self._delivered[number, "arguments", call.index] += len(call.function.arguments)

    def _rest_of(self, data: bytes) -> bytes:
        """Return a continuation's event without the text that the client has; may be empty."""
        chunk: dict[str, Any] = msgspec.json.decode(data)
        choices = chunk.get("choices") or ()
        is_new = not choices
        for choice in choices:
            is_new |= self._cut(choice)
        if not is_new:
            return b""
        if self._created is not None:
            chunk["created"] = self._created
        return DATA + msgspec.json.encode(chunk) + b"\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Drop what the client has from a choice; return whether any part is left."""
        number, is_new = choice.get("index", 0), False
        for holders, field in _parts_of(choice):
            seen = self._seen[field]
            num_had = max(0, self._delivered[field] - seen)
            self._seen[field] += len(holders[0][0][holders[0][1]])
            self._delivered[field] = max(self._delivered[field], self._seen[field])
            for holder, key in holders:
                holder[key] = holder[key][num_had:]
                is_new |= bool(holder[key])
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls")
        if calls:
            kept = [call for call in calls if self._is_call_new(number, call)]
            is_new |= bool(kept)
            delta["tool_calls"] = kept
            if not kept:
                del delta["tool_calls"]
        if choice.get("finish_reason") is not None:
            is_new |= number not in self._ended
            self._ended.add(number)
        return is_new

    def _is_call_new(self, number: int, call: dict[str, Any]) -> bool:
        """Return whether a part of a tool call has anything for the client."""
        index = call.get("index", 0)
        if index >= self._calls[number]:
            self._calls[number] = index + 1
            return True
        # The client has the call's id and name.
        call.pop("id", None)
        call.pop("type", None)
        function = call.get("function") or {}
        function.pop("name", None)
        return bool(function.get("arguments"))


_Holder = tuple[dict[str, Any], str]
"""A JSON object, and the key of a text or list."""


def _parts_of(choice: dict[str, Any]) -> Iterator[tuple[list[_Holder], _Field]]:
    """Yield the texts and lists of a choice, and the field of each."""
    number = choice.get("index", 0)
    for key in ("text", "token_ids"):
        if choice.get(key):
            yield [(choice, key)], (number, key, 0)
    logprobs = choice.get("logprobs") or {}
    if lists := [(logprobs, key) for key in ("content", *_LISTS) if logprobs.get(key)]:
        yield lists, (number, "logprobs", 0)
    delta = choice.get("delta") or {}
    for name in _TEXTS:
        if delta.get(name):
            yield [(delta, name)], (number, name, 0)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("arguments"):
            yield [(function, "arguments")], (number, "arguments", call.get("index", 0))
