"""Bounds on the lists of a body, by field, where a validator looks at each element.

vLLM's models try up to 60 types on each element of a conversation and collect an error of each:
240,000 numbers where messages belong hold an event loop for 12 s, in a body of 0.5 MB, and 4,900
items of the responses API for 18 s. So a long field is looked at here first, until the first
element that is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import msgspec
from pydantic import FailFast, TypeAdapter, ValidationError

from gpupoold.frontend.errors import bad_request
from gpupoold.frontend.grammars.bounds import GrammarFields

MAX_ELEMENTS = 4_096
"""Elements of lists in one field, at any depth. Objects are not counted: see ``json_scan``."""
MAX_PARTS = 1_024
"""Parts of one message. 4,000 wrong ones take 0.4 s, as no type of message fits."""

# Fields that are no larger are left to vLLM, whose errors say more. A wrong item of the responses
# API takes it 4 ms.
_SMALL_BYTES = 4_096
_SMALL_INPUT_BYTES = 64
_CONVERSATIONS = frozenset({"messages", "input"})
_TOKEN_IDS = frozenset({"prompt", "tokens", "allowed_token_ids", "stop_token_ids"})
_BOUND_ELSEWHERE = frozenset(GrammarFields.__struct_fields__)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_token_ids = msgspec.json.Decoder(list[int])
_lists_of_token_ids = msgspec.json.Decoder(list[list[int]])


def check_values(body: bytes) -> None:
    """Check the fields of a JSON object.

    Raises:
        ApiError: 400; a list has too many elements, or a long conversation something that is no
            message.
        msgspec.DecodeError: it is not valid JSON.
        msgspec.ValidationError: it is no object.
    """
    for name, text in _fields.decode(body).items():
        small_bytes = _SMALL_INPUT_BYTES if name == "input" else _SMALL_BYTES
        if name in _BOUND_ELSEWHERE or len(memoryview(text)) <= small_bytes:
            continue
        if name not in _TOKEN_IDS or not _is_token_ids(text):
            _check_long(name, msgspec.json.decode(text))


def _is_token_ids(text: msgspec.Raw) -> bool:
    for decoder in (_token_ids, _lists_of_token_ids):
        try:
            decoder.decode(text)
        except msgspec.ValidationError:
            continue
        return True
    return False


def _check_long(name: str, value: Any) -> None:
    if _has_more_elements(value, MAX_ELEMENTS):
        shown = name if len(name) <= 100 else f"{name[:100]}..."
        kind = "elements that are no token ids" if name in _TOKEN_IDS else "elements in its lists"
        raise bad_request(
            f"`{shown}` has more than {MAX_ELEMENTS:,} {kind}, objects aside.", param=shown
        )
    if name not in _CONVERSATIONS or not isinstance(value, list):
        return
    for where, message in _messages(name, value):
        if not any(isinstance(message.get(key), str) for key in ("role", "type")):
            raise bad_request(f"`{where}` has neither a `role` nor a `type`.", param=name)
        parts = message.get("content")
        if isinstance(parts, list) and len(parts) > MAX_PARTS:
            text = f"`{where}.content` has {len(parts):,} parts, more than {MAX_PARTS:,}."
            raise bad_request(text, param=name)
    if name == "input":
        _check_items(value)


def _has_more_elements(value: Any, bound: int) -> bool:
    number, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting.extend(inner for inner in one.values() if isinstance(inner, dict | list))
        elif isinstance(one, list):
            number += sum(not isinstance(inner, dict) for inner in one)
            if number > bound:
                return True
            waiting.extend(inner for inner in one if isinstance(inner, dict | list))
    return False


def _messages(where: str, value: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages of one conversation, or of a list of conversations."""
    for index, one in enumerate(value):
        if isinstance(one, dict):
            yield f"{where}[{index}]", one
        elif isinstance(one, list):
            yield from _messages(f"{where}[{index}]", one)


def _check_items(value: list[Any]) -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    # Adds what clients may leave out; what it cannot read it leaves as it is.
    prepared = ResponsesRequest.input_item_parsing({"input": value})["input"]
    try:
        _items().validate_python(prepared)
    except ValidationError as error:
        [index, *_] = error.errors(include_url=False)[0]["loc"]
        text = f"`input[{index}]` is no item of a conversation."
        raise bad_request(text, param="input") from None


@functools.cache
def _items() -> TypeAdapter[Any]:
    """Items of the responses API, checked up to the first that is wrong."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    items: Any = get_args(ResponsesRequest.model_fields["input"].annotation)[1]  # [0] is str
    return TypeAdapter(Annotated[items, FailFast()])
