"""Bounds on the lists in a body, by field, where a validator visits each element.

240,000 numbers in place of messages, 0.5 MB, occupy vLLM's validation for 15 s. So a long field is
checked here first: its elements are counted, and messages are checked up to the first wrong one.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec

from gpupoold.frontend.conversations import check_conversation, is_long_conversation
from gpupoold.frontend.errors import bad_request
from gpupoold.frontend.grammars.bounds import GrammarFields
from gpupoold.frontend.pooling_bodies import POOLING_PATHS, check_input
from gpupoold.frontend.pooling_inputs import read_token_ids
from gpupoold.frontend.token_work import why_too_much_work

MAX_ELEMENTS = 4_096
"""Limit of list elements in one field, at any depth. ``json_scan`` counts objects."""
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


def check_values(body: bytes, path: str) -> None:
    """Check the fields of a JSON object sent to ``path``.

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
