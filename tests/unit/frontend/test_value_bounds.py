"""Lists whose elements a validator would look at one by one, each for long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpupoold.frontend.body import MAX_ELEMENTS, check_values
from gpupoold.frontend.conversations import BATCH_PATH, MAX_PARTS
from gpupoold.frontend.errors import ApiError

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MANY = 200_000
MESSAGE = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "a"}


def check(path: str, **fields: Any) -> None:
    check_values(json.dumps(fields).encode(), path)


def path_of(fields: dict[str, Any]) -> str:
    if "input" in fields:
        return RESPONSES
    if "messages" not in fields:
        return TEXT
    return BATCH_PATH if isinstance(fields["messages"][0], list) else CHAT


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [1] * MANY}, "`messages` has more than 4,096 elements"),
        ({"messages": [[1] * MANY]}, "`messages` has more than 4,096 elements"),
        ({"messages": [MESSAGE | {"content": [1] * MANY}]}, "`messages` has more than"),
        ({"messages": [MESSAGE | {"x": {"y": [[None] * MANY]}}]}, "`messages` has more than"),
        ({"messages": [*[MESSAGE] * 200, {}]}, r"`messages\[200\]` is no message"),
        ({"messages": [[*[MESSAGE] * 200, {}]]}, r"`messages\[0\]\[200\]` is no message"),
        ({"messages": [[MESSAGE] * 200, MESSAGE]}, r"`messages\[1\]` is no list of messages"),
        ({"messages": [[MESSAGE] * 200, []]}, r"`messages\[1\]` is no list of messages"),
        ({"messages": [MESSAGE | {"role": 1}] * 200}, r"`messages\[0\]` is no message"),
        ({"messages": [MESSAGE | {"content": 1}] * 4_900}, r"`messages\[0\]` is no message"),
        (
            {"input": [MESSAGE | {"content": [PART | {"type": "input_text"}] * 500 + [1]}]},
            r"`input\[0\]` with `content\[500\]` is no message",
        ),
        (
            {"messages": [MESSAGE, MESSAGE | {"content": [PART] * 1_025}]},
            r"`messages\[1\].content`",
        ),
        ({"input": [MESSAGE | {"content": [1] * 4_000}]}, r"`input\[0\].content` has 4,000 parts"),
        ({"input": dict.fromkeys(map(str, range(1_000)))}, "`input` must be a list"),
        ({"input": [1] * MANY}, "`input` has more than 4,096 elements"),
        ({"input": [1] * MAX_ELEMENTS}, r"`input\[0\]` is no message"),
        ({"input": [*[MESSAGE] * 200, {"type": "x"}]}, r"`input\[200\]` is no message"),
        ({"input": [MESSAGE | {"content": 1}] * 4_900}, r"`input\[0\]` is no message"),
        ({"prompt": [*[1] * MANY, "a"]}, "`prompt` has more than 4,096 elements that are no token"),
        ({"prompt": [[1] * MANY, [None]]}, "`prompt` has more than 4,096 elements"),
        ({"stop_token_ids": [None] * MANY}, "`stop_token_ids` has more than 4,096 elements"),
        ({"bad_words": [1] * MANY}, "`bad_words` has more than 4,096 elements"),
        ({"logit_bias": dict.fromkeys(map(str, range(20_000)))}, "`logit_bias` has an object"),
        ({"logit_bias": dict.fromkeys(map(str, range(16_385)), 1)}, "`logit_bias` has 16,385 tok"),
        (
            {"stop_token_ids": [1] * 16_385},
            "`stop_token_ids` has 16,385 tokens; the bound is 16,384",
        ),
        ({"vllm_xargs": {"a": dict.fromkeys(map(str, range(1_025)))}}, "`vllm_xargs` has an obj"),
        ({"x" * 5_000: [1] * MANY}, r"`x{100}\.\.\.` has more than 4,096 elements"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        check(path_of(fields), **fields)
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
        {"logit_bias": {str(index): 1 for index in range(16_384)}},
        {"metadata": None},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_accepted(fields: dict[str, Any]) -> None:
    check(path_of(fields), **fields)


def test_short_lists_are_left_to_vllm() -> None:
    check(CHAT, messages=[1] * 100)
    check(RESPONSES, input=[{}])
    check(TEXT, prompt=[None])


def test_fields_that_a_path_does_not_have() -> None:
    """vLLM ignores them."""
    check(TEXT, messages=[{}] * 500, input=[{}] * 500)
    check(CHAT, input=[{}] * 500)
