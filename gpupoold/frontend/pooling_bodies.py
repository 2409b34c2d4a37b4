"""Bodies of the pooling APIs: their paths, the number of engine requests, checks of inputs.

vLLM's validator tries the types of five requests on each token id, 20 µs each. So the ids, which
msgspec has validated, are left out of the body, and put back after the validation.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gpupoold.frontend.conversations import check_messages
from gpupoold.frontend.errors import bad_request

SCORING_PATHS = frozenset({"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"})
POOLING_PATHS = SCORING_PATHS | {"/v1/embeddings", "/classify", "/pooling"}

_CONVERSATION = re.compile(rb"\s*\[\s*\{")
_NOTHING = msgspec.Raw(b"null")
_QUERIES = ("query", "queries", "data_1", "text_1")
_DOCUMENTS = ("documents", "items", "data_2", "text_2")

_LIST = re.compile(rb"\s*\[")
_NUMBERS = re.compile(rb"\s*\[\s*[-0-9]")
_SMALL_BYTES = 4_096
_STAND_IN = msgspec.Raw(b"[0]")
_one_input = msgspec.json.Decoder(list[int])
_inputs = msgspec.json.Decoder(list[list[int]])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


TokenIds = list[int] | list[list[int]]


class PoolingFields(msgspec.Struct):
    """The fields of a body with inputs; each names one input or lists several."""

    input: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    query: msgspec.Raw = _NOTHING
    queries: msgspec.Raw = _NOTHING
    data_1: msgspec.Raw = _NOTHING
    text_1: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    items: msgspec.Raw = _NOTHING
    data_2: msgspec.Raw = _NOTHING
    text_2: msgspec.Raw = _NOTHING


_decoder = msgspec.json.Decoder(PoolingFields)


def num_inputs(body: bytes, path: str) -> tuple[int, str]:
    """Return the largest number of engine requests of a body sent to ``path``, and a field.

    The field is the one with most inputs. Embedding models score a pair by two requests, one for
    each side.

    Raises:
        msgspec.DecodeError: the body is not valid JSON.
        msgspec.ValidationError: the body is no object.
    """
    fields = _decoder.decode(body)
    names: Iterable[str] = (*_QUERIES, *_DOCUMENTS) if path in SCORING_PATHS else ("input",)
    counts = {name: _num_items(getattr(fields, name)) for name in names}
    if path not in SCORING_PATHS:
        counts["messages"] = _num_items(fields.messages)
    return max(1, sum(counts.values())), max(counts, key=lambda name: counts[name])


def check_input(name: str, value: Any) -> None:
    """Check the field ``input`` or ``messages`` of a body sent to a pooling API.

    vLLM tries five types on each element and lists an error per type and element: 4,096 numbers
    with a fraction would become an error of 12 MB.

    Raises:
        ApiError: 400; the value is no text, no token ids, no conversation, and no list of these.
    """
    if not isinstance(value, list) or _is_all(value, str) or _is_token_ids(value):
        return
    if _is_all(value, list):
        if all(_is_token_ids(inner) for inner in value):
            return
        for index, inner in enumerate(value):
            check_messages(f"{name}[{index}]", inner)
        return
    if not _is_all(value, dict):
        raise bad_request(
            f"`{name}` must be a text, token ids, a conversation, or a list of these, all of one "
            "kind.",
            param=name,
        )
    check_messages(name, value)


def _is_all(values: list[Any], kind: type) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _num_items(text: msgspec.Raw) -> int:
    view = memoryview(text)
    if bytes(view[:4]) == b"null":
        return 0
    return 1 if _CONVERSATION.match(view) else num_prompts(text)


def num_items(text: msgspec.Raw) -> int:
    """Return the length of a list; any other value counts as one."""
    return len(_list_decoder.decode(text)) if _LIST.match(memoryview(text)) else 1


def num_prompts(text: msgspec.Raw) -> int:
    """Return the number of prompts; a list of numbers is one prompt, of token ids."""
    return 1 if _NUMBERS.match(memoryview(text)) else num_items(text)


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
