"""Streams of a node's events passed on to a client, and continued from another node.

Chats and completions have chunks with choices; Anthropic messages and OpenAI responses have events
with types.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from gpupoold.fleet.asgi import error_body
from gpupoold.wire.continuation import TOKENS_COMMENT, Continuation, OutputSoFar

MAX_EVENT_BYTES = 16 << 20
MAX_OUTPUTS = 1 << 10
MAX_TOKENS = 1 << 21
"""Limit of the tokens of a stream that are kept, of all samples."""
DATA = b"data: "
_TOKENS = f": {TOKENS_COMMENT} ".encode()

_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_THOUGHTS = ("reasoning", "reasoning_content")
# Lists of a completion's log-probabilities, all of one length.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_Field = tuple[int, str, int]
"""A field with text: the choice, the field's name, and the number of the tool call or 0."""

_LAST = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
# Texts of Anthropic's deltas.
_TYPED_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}
_INDICES = ("index", "output_index", "content_index", "summary_index")
# A node that stops, or whose worker has ended for good.
_LOST = frozenset({"internal_error", "overloaded_error"})

# Events with the first mention of an id.
_NAMING = ("response.created", "response.output_item.added")

_Place = tuple[object, ...]
"""Type and indices of an event."""


class Relay(ABC):
    """One stream of events; ``feed`` takes a node's bytes and returns the client's.

    A subclass for each form of events knows what the client has.

    Comments of the node have the ids of the answer's tokens. A continuation repeats the events of
    these tokens; the relay drops what the client has. The text of a token reaches the client after
    the comment, never before, so no text is missing.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """True when the client has the end of the stream."""
        self.lost = b""
        """The node's last event if the node gave the answer up, else empty; held back."""
        self._is_continued = False
        self._outputs: defaultdict[int, OutputSoFar] = defaultdict(OutputSoFar)
        self._num_tokens = 0
        self._rest = bytearray()

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""

    @property
    def can_continue(self) -> bool:
        """False if the answer so far has parts that a continuation could not repeat."""
        return True

    @abstractmethod
    def ending(self, text: str) -> bytes:
        """Return the events that tell the client of an error of code 503."""

    @abstractmethod
    def _passed(self, event: bytes) -> bytes:
        """Return the bytes of an event for the client, empty for what the client has.

        Raises ValueError: the event has another form.
        """

    def _num_kept(self, _: int) -> int | None:
        """Return the number of tokens of a sample to continue after, None for all tokens."""
        return None

    def outputs(self) -> list[OutputSoFar]:
        """Return the samples to continue, without samples at the end that have no tokens."""
        found = [self._kept(number) for number in range(max(self._outputs, default=-1) + 1)]
        while found and not found[-1].token_ids:
            found.pop()
        return found

    def continuation(self, request: bytes) -> bytes:
        """Return the body of the request to continue after the tokens so far."""
        return msgspec.json.encode(Continuation(msgspec.Raw(request), self.outputs()))

    def begin_again(self) -> None:
        """Expect bytes of a different node, from the beginning of the answer."""
        self._rest, self.lost = bytearray(), b""
        self._outputs = defaultdict(OutputSoFar, enumerate(self.outputs()))
        self._is_continued = self.has_begun

    def feed(self, received: bytes) -> bytes:
        """Return the bytes for the client.

        Raises ValueError: an event is too long, or has another form than the protocol's.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += received
        events: list[bytes] = []
        if self._rest.find(b"\n\n", searched) >= 0:
            *events, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of a node has more than {MAX_EVENT_BYTES:,} bytes")
        return b"".join(map(self._told, events))

    def _told(self, event: bytes) -> bytes:
        if event.startswith(_TOKENS):
            self._note_tokens(event[len(_TOKENS) :].decode())
            return b""
        return event + b"\n\n" if event.startswith(b":") else self._passed(event)

    def _note_tokens(self, comment: str) -> None:
        number, ids, *reason = comment.split(" ")
        if not 0 <= int(number) < MAX_OUTPUTS:
            raise ValueError(f"a node tells tokens of sample {number}")
        output = self._outputs[int(number)]
        token_ids = [int(token_id) for token_id in ids.split(",")]
        self._num_tokens += len(token_ids)
        if self._num_tokens > MAX_TOKENS:
            raise ValueError(f"a node tells more than {MAX_TOKENS:,} tokens")
        output.token_ids += token_ids
        output.finish_reason = (reason and reason[0]) or None

    def _kept(self, number: int) -> OutputSoFar:
        output = self._outputs.get(number) or OutputSoFar()
        num_kept = self._num_kept(number)
        if num_kept is None or num_kept >= len(output.token_ids):
            return output
        return OutputSoFar(output.token_ids[:num_kept])


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


class TypedRelay(Relay):
    """A relay of events with types.

    Deltas of a continuation are cut by the number of characters that the client has in each place;
    other events are counted by type and place. Random ids of a continuation are replaced by the
    ids that the client has.
    """

    def __init__(self, *, is_responses: bool) -> None:
        """``is_responses``: the events are OpenAI's, else Anthropic's."""
        super().__init__()
        self._is_responses = is_responses
        self._delivered: Counter[_Place] = Counter()
        self._seen: Counter[_Place] = Counter()  # in the continuation
        self._ids: dict[_Place, str] = {}
        self._replaced: dict[bytes, bytes] = {}
        self._next_number = 0
        self._created: object = None

    @property
    def has_begun(self) -> bool:
        return bool(self._delivered)

    def begin_again(self) -> None:
        super().begin_again()
        self._seen.clear()
        self._replaced.clear()

    def ending(self, text: str) -> bytes:
        if self._is_responses:
            number = self._next_number
            error = {"type": "error", "code": "503", "message": text, "param": None}
            return _event({**error, "sequence_number": number})
        return _event({"type": "error", "error": {"type": "overloaded_error", "message": text}})

    def _passed(self, event: bytes) -> bytes:
        _, found, data = event.partition(DATA)
        if not found:
            return event + b"\n\n"
        for new, had in self._replaced.items():
            data = data.replace(new, had)
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        kind = str(fields.get("type"))
        if _kind_of_error(fields) in _LOST:
            self.lost = event + b"\n\n"
            return b""
        if kind in _NAMING and self._keep_ids(fields):
            return self._passed(event)
        self.is_complete |= kind in _LAST
        if not self._cut(fields):
            return b""
        return _event(fields) if self._is_continued else event + b"\n\n"

    def _cut(self, fields: dict[str, Any]) -> bool:
        """Drop the text that the client has from an event; return whether any part is left."""
        place = _place_of(fields)
        holder, key = _text_of(fields)
        text = holder[key] if key else "."  # an event without a text counts as one character
        num_had = max(0, self._delivered[place] - self._seen[place])
        self._seen[place] += len(text)
        self._delivered[place] = max(self._delivered[place], self._seen[place])
        rest = text[num_had:]
        if not rest:
            return False
        if key:
            holder[key] = rest
        if "sequence_number" in fields:
            fields["sequence_number"] = self._next_number
            self._next_number += 1
        if isinstance(response := fields.get("response"), dict):
            self._created = self._created or response.get("created_at")
            response["created_at"] = self._created
        return True

    def _keep_ids(self, fields: dict[str, Any]) -> bool:
        """Note the random ids of an event; return whether any is to be replaced from now on."""
        place, is_new = _place_of(fields), False
        for name in ("response", "item"):
            holder = fields.get(name)
            for key in ("id", "call_id"):
                value = holder.get(key) if isinstance(holder, dict) else None
                if not isinstance(value, str):
                    continue
                had = self._ids.setdefault((*place, name, key), value)
                if had != value:
                    self._replaced[value.encode()] = had.encode()
                    is_new = True
        return is_new


def _event(fields: dict[str, Any]) -> bytes:
    kind = str(fields.get("type")).encode()
    return b"event: %s\ndata: %s\n\n" % (kind, msgspec.json.encode(fields))


def _place_of(fields: dict[str, Any]) -> _Place:
    delta = fields.get("delta")
    kind = delta.get("type") if isinstance(delta, dict) else None
    return (fields.get("type"), kind, *(fields.get(name) for name in _INDICES))


def _text_of(fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the object with the text of a delta and the text's key, empty for other events."""
    delta = fields.get("delta")
    if isinstance(delta, str):
        return fields, "delta"
    if isinstance(delta, dict) and (key := _TYPED_TEXTS.get(str(delta.get("type")))) in delta:
        return delta, str(key)
    return fields, ""


def _kind_of_error(fields: dict[str, Any]) -> object:
    error = fields.get("error")
    return error.get("type") if fields.get("type") == "error" and isinstance(error, dict) else None
