"""HTTP request bodies, bounded in size, time and structure; the fields that the frontend reads."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope

from gpupoold.engine_options.defaults import LIMITS
from gpupoold.frontend.conversations import (
    BATCH_PATH,
    POOLING_PATHS,
    SCORING_PATHS,
    check_conversation,
    check_input,
    is_long_conversation,
    num_inputs,
    num_items,
    num_prompts,
    read_token_ids,
)
from gpupoold.frontend.errors import ApiError, bad_request, too_large
from gpupoold.frontend.grammars import GrammarFields, OverBound, check_fields
from gpupoold.frontend.request_context import BodyHolding, check_client_id, why_too_much_work

BODY_TIMEOUT_S = 60.0
_STRETCH_BYTES = 16_384
_BETWEEN_STRETCHES_S = 0.002

MAX_CONTAINERS = 5_000
"""Limit of objects and arrays, the most expensive values: a message has one, a tool three and
its schema.
"""
MAX_STRINGS = 50_000
"""The names of fields are strings too."""
MAX_VALUES = 310_000
"""Limit of all values: enough for 300,000 token ids, OpenAI's limit of one request to embed."""
MAX_DEPTH = 100

_KEPT = b"[]{},"
_NOT_STRUCTURE = bytes(set(range(256)) - set(_KEPT))
_OPENING = frozenset(b"[{")

MAX_SAMPLES = 128
"""Limit of ``n``, as OpenAI's."""
MAX_PROMPTS = 512
"""Limit of prompts or conversations per HTTP request, which all begin at once."""
MAX_INPUTS = 2_048
"""Limit of inputs to embed, or of documents to score, as OpenAI's."""

_NO_PROMPT = msgspec.Raw(b"null")
_BEFORE_SURROGATE, _SURROGATE = 0xED, 0xA0

MAX_ELEMENTS = 4_096
"""Limit of list elements in one field, at any depth. ``body`` counts objects."""
MAX_NAMES = 1_024
"""Limit of names in one object. 49,000 wrong values in ``vllm_xargs`` take vLLM 1.0 s."""
_SMALL_BYTES = 4_096
"""Length below which a field's elements are not counted: vLLM's errors are more precise."""
_TOKEN_IDS = frozenset({"prompt", "tokens", "allowed_token_ids", "stop_token_ids"})
_BOUND_ELSEWHERE = frozenset(GrammarFields.__struct_fields__)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_token_ids = msgspec.json.Decoder(list[int])
_lists_of_token_ids = msgspec.json.Decoder(list[list[int]])
_biases = msgspec.json.Decoder(dict[str, float])
# Types of long fields that are checked up to the first wrong element, at any length.
_NUMBERS = dict.fromkeys(_TOKEN_IDS, (_token_ids, _lists_of_token_ids)) | {"logit_bias": (_biases,)}


class Disconnected(Exception):
    """The client disconnected while its request was being read."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, holding: BodyHolding) -> bytes:
    """Read a JSON body, whose bytes are counted in ``holding``.

    Raises:
        ApiError: 400, 408, 413 or 429: the body has too many values, does not arrive in time, or is
            too large in itself or beside other requests.
        Disconnected: the client disconnected.
    """
    if declared_length(scope) > max_bytes:
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _join(receive, max_bytes, holding)
    except TimeoutError:
        text = f"The request body has not come within {BODY_TIMEOUT_S:g} s."
        raise ApiError(408, text) from None
    except TooMuchJson as error:
        raise bad_request(str(error)) from None


async def _join(receive: Receive, max_bytes: int, holding: BodyHolding) -> bytes:
    pieces: list[bytes] = []
    num_bytes, scan = 0, JsonScan()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        holding.add(len(piece))
        scan.feed(piece)
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


async def let_others_run(num_bytes: int) -> None:
    """Suspend the task between two stretches of work on a request, if it has many bytes.

    A chunk of another stream passes through several tasks, so one turn of the event loop would not
    be enough.
    """
    if num_bytes > _STRETCH_BYTES:
        await asyncio.sleep(_BETWEEN_STRETCHES_S)


def without_bom(body: bytes) -> bytes:
    """Return a body without UTF-8's byte order mark, which editors of Windows write."""
    return body.removeprefix(codecs.BOM_UTF8)


def replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` for the application: the body once, then the client's own messages."""
    unread = [body]

    async def receive_again() -> MutableMapping[str, Any]:
        if not unread:
            return await receive()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return receive_again


def declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


class TooMuchJson(Exception):
    """A JSON text exceeds a bound; the message names the bound."""


class JsonScan:
    """Counts the values of one JSON text. For other texts the counts are meaningless.

    A parser's time and memory depend on the number of values rather than of bytes, and a parser
    cannot be interrupted: 10 MB of ``[[],[],...`` block an event loop for most of a second, 10 MB
    of one string for some milliseconds. The scan does not parse: strings are cut out, and the rest
    is counted piece by piece.
    """

    def __init__(self) -> None:
        self.num_containers = 0
        self.num_strings = 0
        self.num_values = 1
        self._depth = 0
        self._is_in_string = False
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Count the next piece of the text. Raises TooMuchJson: the text so far exceeds a bound."""
        outside = self._outside_strings(piece).translate(None, _NOT_STRUCTURE)
        num_commas = outside.count(b",")
        num_opened = outside.count(b"[") + outside.count(b"{")
        self.num_containers += num_opened
        self.num_values += num_commas + num_opened
        _check(self.num_containers, MAX_CONTAINERS, "objects and arrays")
        _check(self.num_strings, MAX_STRINGS, "strings, names of fields among them")
        _check(self.num_values, MAX_VALUES, "values")
        for byte in outside.translate(None, b","):
            if self._depth < 0:
                break  # more closed than opened: the parser refuses the body
            self._depth += 1 if byte in _OPENING else -1
            if self._depth > MAX_DEPTH:
                raise TooMuchJson(f"The request body is nested more than {MAX_DEPTH} levels deep.")

    def _outside_strings(self, piece: bytes) -> bytes:
        text = self._rest + piece
        # A backslash escapes the next character, which may be in the next piece.
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""
        if self._rest:
            text = text[:-1]
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = parts[1::2] if self._is_in_string else parts[::2]
        num_quotes = len(parts) - 1
        self.num_strings += (num_quotes + (not self._is_in_string)) // 2
        self._is_in_string ^= bool(num_quotes % 2)
        return b"".join(outside)


def _check(number: int, bound: int, what: str) -> None:
    if number > bound:
        raise TooMuchJson(f"The request body has more than {bound:,} {what}.")


class _Fields(GrammarFields):
    model: Any = None
    request_id: Any = msgspec.UNSET
    n: Any = None
    prompt: msgspec.Raw = _NO_PROMPT
    messages: msgspec.Raw = _NO_PROMPT
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


class Head(msgspec.Struct, frozen=True):
    """``num_prompts`` counts conversations and inputs too; each is answered ``num_samples``
    times. ``has_limit``: the client limits the tokens of an answer.
    """

    model: str | None
    has_id: bool
    num_prompts: int
    num_samples: int
    has_limit: bool = False
    is_pooling: bool = False

    @property
    def num_requests(self) -> int:
        """Number of engine requests of this HTTP request."""
        return self.num_prompts * self.num_samples


_decoder = msgspec.json.Decoder(_Fields)


def read_head(body: bytes, path: str) -> Head:
    """Read the head of a JSON request to ``path``.

    Raises:
        ApiError: 400; the body is no JSON object, a field is invalid, or a grammar exceeds a bound.
    """
    if _has_surrogate(body):
        raise bad_request("The request body is not valid UTF-8: it has a surrogate.")
    try:
        fields = _decoder.decode(body)
        has_id = fields.request_id is not msgspec.UNSET
        if has_id:
            check_client_id(fields.request_id, "`request_id`")
        most, kind = MAX_PROMPTS, "prompts"
        if is_pooling := path in POOLING_PATHS:
            number, where = num_inputs(body, path)
            most, kind = MAX_INPUTS + (path in SCORING_PATHS), "inputs"
        elif path == BATCH_PATH:
            number, where = num_items(fields.messages), "messages"
        else:
            number, where = num_prompts(fields.prompt), "prompt"
        num_samples = 1 if is_pooling else _num_samples(fields.n)
        if number > most:
            text = f"The request has {number:,} {kind}, more than the {most:,} that it may have."
            raise bad_request(text, param=where)
        check_values(body, path)
    except msgspec.ValidationError as error:
        raise bad_request(f"The request body must be a JSON object: {error}.") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from error
    if fields.model is not None and not isinstance(fields.model, str):
        raise bad_request("`model` must be a string.", param="model")
    try:
        check_fields(fields)
    except OverBound as error:
        raise bad_request(f"{error}.", param=error.field) from error
    has_limit = any(getattr(fields, name) is not None for name in LIMITS)
    return Head(fields.model, has_id, number, num_samples, has_limit, is_pooling)


def _has_surrogate(body: bytes) -> bool:
    """Return whether a body has an encoded surrogate, which no valid UTF-8 has.

    Python's json takes them one by one, each by an exception: 5 MB in 1.2 s.
    """
    begin = body.find(_BEFORE_SURROGATE)
    if begin < 0:
        return False
    codes = np.frombuffer(body, np.uint8, offset=begin)
    return bool(np.any((codes[:-1] == _BEFORE_SURROGATE) & (codes[1:] >= _SURROGATE)))


def check_num_requests(head: Head, bound: int) -> None:
    """Check that a request could be admitted without any other live request.

    The inputs of a pooling request need not be live at once. Raises ApiError: 400; the request asks
    for more answers than ``bound``.
    """
    if head.num_requests > bound and not head.is_pooling:
        raise bad_request(
            f"The request asks for {head.num_requests:,} answers ({head.num_prompts:,} prompts, "
            f"`n` = {head.num_samples}), more than the {bound:,} that may be live at once.",
            param="n",
        )


def _num_samples(value: object) -> int:
    """Return ``n`` as vLLM reads the value; a value that vLLM refuses counts as 1."""
    try:
        number = int(value) if isinstance(value, int | float | str) else 1
    except (ValueError, OverflowError):
        return 1
    if number > MAX_SAMPLES:
        raise bad_request(f"`n` must be at most {MAX_SAMPLES}.", param="n")
    return max(1, number)


def check_values(body: bytes, path: str) -> None:
    """Check the fields of a JSON object sent to ``path``.

    240,000 numbers in place of messages, 0.5 MB, occupy vLLM's validation for 15 s. So a long field
    is checked here first: its elements are counted, and messages are checked up to the first wrong
    one.

    Raises:
        ApiError: 400; a list has too many elements, or a long conversation an invalid message.
        msgspec.DecodeError: the body is not valid JSON.
        msgspec.ValidationError: the body is no object.
    """
    for name, text in _fields.decode(body).items():
        num_bytes = len(memoryview(text))
        is_conversation = is_long_conversation(name, num_bytes, path)
        if name in _BOUND_ELSEWHERE or not (is_conversation or num_bytes > _SMALL_BYTES):
            continue
        is_pooling = path in POOLING_PATHS
        if not (is_conversation or is_pooling) and bytes(memoryview(text)[:1]) == b'"':
            continue  # a string has no elements, and need not be decoded
        is_input = is_pooling and name == "input"
        if (numbers := _numbers(name, text)) is not None:
            if (found := why_too_much_work(SimpleNamespace(**{name: numbers}))) is not None:
                raise bad_request(found[1], param=name)
        elif not (is_input and read_token_ids(text) is not None):
            value = msgspec.json.decode(text)
            _check_number(name, value)
            if is_conversation:
                check_conversation(name, value, path)
            elif is_pooling and name in ("input", "messages"):
                check_input(name, value)


def _numbers(name: str, text: msgspec.Raw) -> Any:
    """Return a field of token ids or biases as numbers; None for others, and if it is malformed."""
    for decoder in _NUMBERS.get(name, ()):
        with contextlib.suppress(msgspec.ValidationError):
            return decoder.decode(text)
    return None


def _check_number(name: str, value: Any) -> None:
    shown = name if len(name) <= 100 else f"{name[:100]}..."
    num_elements, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if len(one) > MAX_NAMES:
                text = f"`{shown}` has an object with more than {MAX_NAMES:,} names."
                raise bad_request(text, param=shown)
            waiting.extend(inner for inner in one.values() if isinstance(inner, dict | list))
        elif isinstance(one, list):
            num_elements += sum(not isinstance(inner, dict) for inner in one)
            if num_elements > MAX_ELEMENTS:
                kind = "that are no token ids" if name in _TOKEN_IDS else "in its lists"
                text = f"`{shown}` has more than {MAX_ELEMENTS:,} elements {kind}, objects aside."
                raise bad_request(text, param=shown)
            waiting.extend(inner for inner in one if isinstance(inner, dict | list))
