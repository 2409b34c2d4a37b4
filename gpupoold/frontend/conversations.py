"""Conversations and inputs in bodies: their number, and the first wrong element of a long list.

vLLM's models try up to 60 types on a message and list an error per type and message: 4,900 wrong
messages of the chat API take 0.7 s, and wrong items of the responses API 18 s, during which the
event loop is blocked.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec
from pydantic import FailFast, TypeAdapter, ValidationError

from gpupoold.frontend.errors import ApiError, bad_request

MAX_PARTS = 1_024
"""Limit of the parts of one message."""
BATCH_PATH = "/v1/chat/completions/batch"
_RESPONSES_PATH = "/v1/responses"
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_CHAT_PATHS = ("/v1/chat/completions", BATCH_PATH, "/tokenize")
_FEW_PARTS = 8
"""Limit of the parts of a message that is checked only as a whole."""

# vLLM checks conversations up to this size, because its errors contain more detail. vLLM needs
# 0.2 ms for a wrong message of the chat API and 4 ms for a wrong item of the responses API.
_SMALL_BYTES = 1_024
_SMALL_ITEMS_BYTES = 64

SCORING_PATHS = frozenset({"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"})
POOLING_PATHS = SCORING_PATHS | {"/v1/embeddings", "/classify", "/pooling"}

_CONVERSATION = re.compile(rb"\s*\[\s*\{")
_NOTHING = msgspec.Raw(b"null")
_QUERIES = ("query", "queries", "data_1", "text_1")
_DOCUMENTS = ("documents", "items", "data_2", "text_2")

_LIST = re.compile(rb"\s*\[")
_NUMBERS = re.compile(rb"\s*\[\s*[-0-9]")
_FEW_TOKEN_IDS_BYTES = 4_096
_STAND_IN = msgspec.Raw(b"[0]")
_one_input = msgspec.json.Decoder(list[int])
_inputs = msgspec.json.Decoder(list[list[int]])
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


TokenIds = list[int] | list[list[int]]


def is_long_conversation(name: str, num_bytes: int, path: str) -> bool:
    """Return whether the field called ``name`` of a request to ``path`` is a conversation to look
    at."""
    if path == _RESPONSES_PATH:
        return name == "input" and num_bytes > _SMALL_ITEMS_BYTES
    has_messages = path in _CHAT_PATHS or path in _ANTHROPIC_PATHS
    return has_messages and name == "messages" and num_bytes > _SMALL_BYTES


def check_conversation(name: str, value: Any, path: str) -> None:
    """Check the field called ``name`` of a request to ``path``.

    Raises ApiError: 400; the field is an object, or a list with an element that is no message.
    """
    if isinstance(value, dict):  # vLLM iterates over the keys
        raise bad_request(f"`{name}` must be a list, or text.", param=name)
    if not isinstance(value, list):
        return
    types = message_types()[path]
    if path != BATCH_PATH:
        _check(name, value, types)
        return
    for index, messages in enumerate(value):
        if not isinstance(messages, list) or not messages:
            raise bad_request(f"`{name}[{index}]` is no list of messages.", param=name)
        _check(f"{name}[{index}]", messages, types)


def check_messages(name: str, messages: list[Any]) -> None:
    """Check a conversation of the chat API in the field ``name`` of another API.

    Raises ApiError: 400; an element is no message.
    """
    _check(name, messages, message_types()[_CHAT_PATHS[0]])


@dataclass(frozen=True, slots=True)
class MessageType:
    """The type of an API's messages; ``prepare`` adds fields that clients may omit."""

    adapter: TypeAdapter[Any]
    prepare: Callable[[list[Any]], list[Any]]

    def first_wrong(self, messages: list[Any]) -> int | None:
        try:
            self.adapter.validate_python(self.prepare(messages))
        except ValidationError as error:
            [index, *_] = error.errors(include_url=False, include_input=False)[0]["loc"]
            return int(index)
        return None


@functools.cache
def message_types() -> dict[str, MessageType]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    def fail_fast(messages: Any) -> TypeAdapter[Any]:
        return TypeAdapter(Annotated[messages, FailFast()])

    def prepare_items(items: list[Any]) -> list[Any]:
        prepared: list[Any] = ResponsesRequest.input_item_parsing({"input": items})["input"]
        return prepared

    items = get_args(ResponsesRequest.model_fields["input"].annotation)[1]  # [0] is str
    chat = fail_fast(ChatCompletionRequest.model_fields["messages"].annotation)
    anthropic = fail_fast(AnthropicMessagesRequest.model_fields["messages"].annotation)
    return {
        _RESPONSES_PATH: MessageType(fail_fast(items), prepare_items),
        **dict.fromkeys(_CHAT_PATHS, MessageType(chat, list)),
        **dict.fromkeys(_ANTHROPIC_PATHS, MessageType(anthropic, list)),
    }


def _check(where: str, messages: list[Any], types: MessageType) -> None:
    for index, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and len(parts) > _FEW_PARTS:
            _check_parts(f"{where}[{index}]", message, parts, types)
    wrong = types.first_wrong(messages)
    if wrong is not None:
        raise _refusal(f"`{where}[{wrong}]` is no message of this API.", where)


def _check_parts(where: str, message: dict[str, Any], parts: list[Any], types: MessageType) -> None:
    """Check the parts one by one, because each part must be valid for the whole to be."""
    if len(parts) > MAX_PARTS:
        text = f"`{where}.content` has {len(parts):,} parts, more than {MAX_PARTS:,}."
        raise _refusal(text, where)
    wrong = types.first_wrong([message | {"content": [part]} for part in parts])
    if wrong is not None:
        raise _refusal(f"`{where}` with `content[{wrong}]` is no message of this API.", where)


def _refusal(text: str, where: str) -> ApiError:
    return bad_request(text, param=where.partition("[")[0])


class PoolingFields(msgspec.Struct):
    """The fields of a body with inputs; each names one input or lists several.

    vLLM's validator tries the types of five requests on each token id, 20 µs each. So the ids,
    which msgspec has validated, are left out of the body, and put back after the validation.
    """

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
    with a fraction would become an error of 12 MB. Raises ApiError: 400; the value is no text, no
    token ids, no conversation, and no list of these.
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
    if text is None or len(memoryview(text)) <= _FEW_TOKEN_IDS_BYTES:
        return body, None
    token_ids = read_token_ids(text)
    if token_ids is None:
        return body, None
    return msgspec.json.encode(fields | {"input": _STAND_IN}), token_ids
