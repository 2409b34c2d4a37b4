"""A stream from a node to the client, to be continued by a different node.

Comments of the node have the ids of the answer's tokens. A continuation repeats the text of these
tokens; the relay drops the text that the client has, by the number of characters in each field.
The text of a token reaches the client after the comment, never before, so no text is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from gpupoold.wire.continuation import TOKENS_COMMENT, Continuation

CONTINUED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_EVENT_BYTES = 16 << 20
_TOKENS = f": {TOKENS_COMMENT} ".encode()
_DATA = b"data: "
_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")

_Field = tuple[int, str, int]
"""A field with text: the choice, the field's name, and the number of the tool call or 0."""


class Wanted(msgspec.Struct):
    """The fields of a client's request for routing and continuation."""

    model: str = ""
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    input: msgspec.Raw = msgspec.Raw(b"null")

    def can_continue(self, path: str) -> bool:
        """Return whether a different node could continue the answer after the first events."""
        prompt = bytes(self.prompt).lstrip()
        is_one = not prompt.startswith(b"[") or prompt[1:].lstrip()[:1].isdigit()
        return (
            path in CONTINUED_PATHS
            and bool(self.stream)
            and self.n in (None, 1)
            and self.best_of in (None, 1)
            and (self.logprobs is None or self.logprobs is False)
            and not self.echo
            and is_one
        )


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


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    created: int | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class Relay:
    """One stream of events; ``feed`` takes a node's bytes and returns the client's."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.is_complete = False
        """True when the client has the end of the stream."""
        self.lost = b""
        """The node's last event if the node gave the answer up, else empty; held back."""
        self._rest = b""
        self._is_continued = False
        self._created: int | None = None
        self._delivered: Counter[_Field] = Counter()
        self._seen: Counter[_Field] = Counter()  # in the continuation
        self._calls: Counter[int] = Counter()  # delivered tool calls of each choice
        self._ended: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""
        return bool(self._delivered or self._calls or self._ended or self._created)

    def continuation(self, request: bytes) -> bytes:
        """Return the body of the request to continue after the tokens so far."""
        body = Continuation(msgspec.Raw(request), self.token_ids, self.finish_reason)
        return msgspec.json.encode(body)

    def begin_again(self) -> None:
        """Expect bytes of a different node, from the beginning of the answer."""
        self._rest = self.lost = b""
        self._is_continued = self.has_begun
        self._seen.clear()

    def feed(self, received: bytes) -> bytes:
        """Return the bytes for the client.

        Raises:
            ValueError: an event is too long, or has another form than OpenAI's.
        """
        *events, self._rest = (self._rest + received).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of a node has more than {MAX_EVENT_BYTES:,} bytes")
        return b"".join(self._passed(event) for event in events)

    def _passed(self, event: bytes) -> bytes:
        if event.startswith(_TOKENS):
            ids, _, reason = event[len(_TOKENS) :].decode().partition(" ")
            self.token_ids += map(int, ids.split(","))
            self.finish_reason = reason or None
            return b""
        if not event.startswith(_DATA):
            return event + b"\n\n"
        data = event[len(_DATA) :]
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
            if (delta := choice.delta) is None:
                continue
            for name in _TEXTS:
                if text := getattr(delta, name):
                    self._delivered[choice.index, name, 0] += len(text)
            for call in delta.tool_calls or ():
                self._calls[choice.index] = max(self._calls[choice.index], call.index + 1)
                if call.function is not None and call.function.arguments:
                    field = choice.index, "arguments", call.index
                    self._delivered[field] += len(call.function.arguments)

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
        return _DATA + msgspec.json.encode(chunk) + b"\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Drop the text that the client has from a choice; return whether any part is left."""
        number, is_new = choice.get("index", 0), False
        for holder, key, field in _texts_of(choice):
            seen, text = self._seen[field], holder[key]
            self._seen[field] += len(text)
            rest = text[max(0, self._delivered[field] - seen) :]
            holder[key] = rest
            self._delivered[field] = max(self._delivered[field], self._seen[field])
            is_new |= bool(rest)
        delta = choice.get("delta") or {}
        calls = delta.get("tool_calls")
        if calls:
            kept = [one for one in calls if self._is_call_new(number, one)]
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


def _texts_of(choice: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, _Field]]:
    """Yield the texts of a choice: object and key of the text, and the field."""
    number = choice.get("index", 0)
    if choice.get("text"):
        yield choice, "text", (number, "text", 0)
    delta = choice.get("delta") or {}
    for name in _TEXTS:
        if delta.get(name):
            yield delta, name, (number, name, 0)
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("arguments"):
            yield function, "arguments", (number, "arguments", call.get("index", 0))
