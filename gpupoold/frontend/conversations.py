"""Search of long conversations for the first message that vLLM would refuse.

vLLM's models try up to 60 types on a message and list an error per type and message: 4,900 wrong
messages of the chat API take 0.7 s, and wrong items of the responses API 18 s, during which the
event loop is blocked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

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


def is_long_conversation(name: str, num_bytes: int, path: str) -> bool:
    """Return whether the field called ``name`` of a request to ``path`` is a conversation to look
    at."""
    if path == _RESPONSES_PATH:
        return name == "input" and num_bytes > _SMALL_ITEMS_BYTES
    has_messages = path in _CHAT_PATHS or path in _ANTHROPIC_PATHS
    return has_messages and name == "messages" and num_bytes > _SMALL_BYTES


def check_conversation(name: str, value: Any, path: str) -> None:
    """Check the field called ``name`` of a request to ``path``.

    Raises:
        ApiError: 400; the field is an object, or a list with an element that is no message.
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

    Raises:
        ApiError: 400; an element is no message.
    """
    _check(name, messages, message_types()[_CHAT_PATHS[0]])


@dataclass(frozen=True, slots=True)
class MessageType:
    """The type of an API's messages; ``prepare`` adds fields that clients may omit."""

    adapter: TypeAdapter[Any]
    prepare: Callable[[list[Any]], list[Any]]

    def first_wrong(self, messages: list[Any]) -> int | None:
        """Return the index of the first message of another type."""
        try:
            self.adapter.validate_python(self.prepare(messages))
        except ValidationError as error:
            [index, *_] = error.errors(include_url=False, include_input=False)[0]["loc"]
            return int(index)
        return None


@functools.cache
def message_types() -> dict[str, MessageType]:
    """Return the types by path."""
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
