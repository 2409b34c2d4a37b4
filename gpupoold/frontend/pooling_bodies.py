"""Bodies of the pooling APIs: their paths, the number of engine requests, checks of inputs."""

from __future__ import annotations

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
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


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
