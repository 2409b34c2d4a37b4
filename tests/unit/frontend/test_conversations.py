"""The look at long conversations and vLLM's own models agree."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

from gpupoold.frontend.conversations import check_conversation
from gpupoold.frontend.errors import ApiError

TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}
CHAT = [
    USER,
    {"role": "user", "content": [TEXT, IMAGE]},
    {"role": "user", "content": [TEXT] * 20},
    {"role": "user", "content": ["a"] * 20},
    {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
    },
    {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a"}}], "name": "n"},
    {"role": "user", "content": None},
    {"role": "user"},
    {"role": "system", "content": "a"},
    {"role": "developer", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "a", "reasoning_content": "b"},
    {"role": "assistant", "content": "a", "reasoning": "b"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
    {"role": "tool", "tool_call_id": "c", "content": "a"},
    {"role": "tool", "tool_call_id": "c", "content": [TEXT] * 20},
    {"role": "function", "name": "f", "content": "a"},
    {"role": "ipython", "content": "a"},
    {"role": "x", "content": "a", "more": {"a": [1]}},
    {"role": "user", "content": 1},
    {"role": "user", "content": [1]},
    {"role": "user", "content": [{}] * 20},
    {"role": "user", "content": [TEXT, {"type": "nope"}]},
    {"role": 1, "content": "a"},
    {"content": "a"},
    {"type": "x"},
    {},
    [],
    [USER],
    None,
    "a",
    1,
]
ITEMS = [
    USER,
    {"type": "message", "role": "assistant", "content": "a"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/a.png"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 20},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ""}] * 20},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "reasoning", "summary": []},
    {"type": "custom_tool_call", "call_id": "a", "name": "n", "input": "x"},
    {"type": "item_reference", "id": "x"},
    {"type": "x"},
    {"role": "user", "content": 1},
    {"role": "user", "content": [{"type": "x"}] * 20},
    {},
    None,
    1,
]
BLOCKS = [
    USER,
    {"role": "assistant", "content": [TEXT] * 20},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_removal"}]},
    {"role": "user", "content": [1] * 20},
    {"role": "x", "content": "a"},
    {"role": "user", "content": None},
    {},
    1,
]


@pytest.mark.parametrize(
    ("path", "model", "messages", "more"),
    [
        ("/v1/chat/completions", ChatCompletionRequest, CHAT, {}),
        ("/tokenize", TokenizeChatRequest, CHAT, {}),
        ("/v1/responses", ResponsesRequest, ITEMS, {}),
        ("/v1/messages", AnthropicMessagesRequest, BLOCKS, {"model": "m", "max_tokens": 1}),
    ],
    ids=["chat", "tokenize", "responses", "messages"],
)
def test_same_messages_as_vllm(
    path: str, model: type[BaseModel], messages: list[Any], more: dict[str, Any]
) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    found = {}
    for message in messages:
        text = json.dumps([USER, message])
        found[str(message)] = (
            accepted_by_vllm(model, {field: json.loads(text)} | more),
            accepted(field, json.loads(text), path),
        )
    assert [message for message, (wanted, got) in found.items() if wanted != got] == []
    assert {wanted for wanted, _ in found.values()} == {True, False}


def accepted_by_vllm(model: type[BaseModel], fields: dict[str, Any]) -> bool:
    try:
        model.model_validate(fields)
    except ValidationError:
        return False
    return True


def accepted(field: str, value: list[Any], path: str) -> bool:
    try:
        check_conversation(field, value, path)
    except ApiError:
        return False
    return True
