"""Lists whose elements a validator would look at one by one, each for long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.value_bounds import MAX_ELEMENTS, MAX_PARTS, check_values

MANY = 200_000
MESSAGE = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "a"}


def check(**fields: Any) -> None:
    check_values(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [1] * MANY}, "`messages` has more than 4,096 elements"),
        ({"messages": [[1] * MANY]}, "`messages` has more than 4,096 elements"),
        ({"messages": [MESSAGE | {"content": [1] * MANY}]}, "`messages` has more than"),
        ({"messages": [MESSAGE | {"x": {"y": [[None] * MANY]}}]}, "`messages` has more than"),
        ({"messages": [*[MESSAGE] * 200, {}]}, r"`messages\[200\]` has neither a `role`"),
        ({"messages": [[*[MESSAGE] * 200, {}]]}, r"`messages\[0\]\[200\]` has neither a `role`"),
        ({"messages": [MESSAGE | {"role": 1}] * 200}, r"`messages\[0\]` has neither a `role`"),
        (
            {"messages": [MESSAGE, MESSAGE | {"content": [PART] * 1_025}]},
            r"`messages\[1\].content`",
        ),
        ({"input": [MESSAGE | {"content": [1] * 4_000}]}, r"`input\[0\].content` has 4,000 parts"),
        ({"input": [1] * MANY}, "`input` has more than 4,096 elements"),
        ({"input": [1] * MAX_ELEMENTS}, r"`input\[0\]` is no item"),
        ({"input": [*[MESSAGE] * 200, {"type": "x"}]}, r"`input\[200\]` is no item"),
        ({"input": [MESSAGE | {"content": 1}] * 4_900}, r"`input\[0\]` is no item"),
        ({"prompt": [*[1] * MANY, "a"]}, "`prompt` has more than 4,096 elements that are no token"),
        ({"prompt": [[1] * MANY, [None]]}, "`prompt` has more than 4,096 elements"),
        ({"stop_token_ids": [None] * MANY}, "`stop_token_ids` has more than 4,096 elements"),
        ({"bad_words": [1] * MANY}, "`bad_words` has more than 4,096 elements"),
        ({"x" * 5_000: [1] * MANY}, r"`x{100}\.\.\.` has more than 4,096 elements"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        check(**fields)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": list(range(MANY))},
        {"prompt": [list(range(MANY // 2))] * 2},
        {"prompt": ["a" * 1_000] * 500},
        {"prompt": "a" * MANY},
        {"tokens": [1] * MANY, "allowed_token_ids": [1] * MANY},
        {"messages": [MESSAGE] * 4_900},
        {"messages": [[MESSAGE] * 10] * 300},
        {"messages": [MESSAGE | {"content": [PART] * MAX_PARTS}]},
        {"messages": [MESSAGE | {"content": ["a" * 10] * MAX_PARTS}]},
        {"messages": "a" * MANY},
        {"input": [MESSAGE] * 4_000},
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}] * 500},
        {"input": "a" * MANY},
        {"logit_bias": {str(index): 1 for index in range(20_000)}},
        {"metadata": None},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_accepted(fields: dict[str, Any]) -> None:
    check(**fields)


def test_small_bodies_are_left_to_vllm() -> None:
    check(messages=[1] * 100, input=[{}], prompt=[None])


@pytest.mark.parametrize(
    "item",
    [
        MESSAGE,
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/a.png"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "reasoning", "summary": []},
        {"type": "custom_tool_call", "call_id": "a", "name": "n", "input": "x"},
    ],
    ids=str,
)
def test_items_that_vllm_takes(item: dict[str, Any]) -> None:
    ResponsesRequest.model_validate({"input": [dict(item)]})
    check(input=[item] * 100)


@pytest.mark.parametrize("wrong", [1, {"type": "x"}, {"role": "user", "content": 1}], ids=str)
def test_wrong_items_in_a_small_body(wrong: object) -> None:
    """A thousand of them take vLLM seconds."""
    with pytest.raises(ApiError, match=r"`input\[0\]` is no item"):
        check(input=[wrong] * 50)


def test_messages_that_vllm_takes() -> None:
    check(messages=[MESSAGE] * 500)
    ChatCompletionRequest.model_validate({"messages": [MESSAGE]})
