"""No field of a request may cost vLLM's validation more than a few thousand errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from gpupoold.frontend.body import MAX_CONTAINERS, MAX_ELEMENTS, MAX_STRINGS, read_head
from gpupoold.frontend.errors import ApiError

MAX_ERRORS = 20_000
"""Of which pydantic makes and lists some 200 in a millisecond."""
MESSAGE = {"role": "user", "content": "a"}
ANTHROPIC = {"messages": [MESSAGE], "max_tokens": 4, "model": "m"}
REQUESTS: dict[str, list[tuple[type[BaseModel], dict[str, Any]]]] = {
    "/v1/chat/completions": [(ChatCompletionRequest, {"messages": [MESSAGE]})],
    "/v1/chat/completions/batch": [(BatchChatCompletionRequest, {"messages": [[MESSAGE]]})],
    "/v1/completions": [(CompletionRequest, {"prompt": "a"})],
    "/v1/responses": [(ResponsesRequest, {"input": "a"})],
    "/v1/messages": [(AnthropicMessagesRequest, ANTHROPIC)],
    "/v1/messages/count_tokens": [(AnthropicCountTokensRequest, ANTHROPIC)],
    "/tokenize": [
        (TokenizeChatRequest, {"messages": [MESSAGE]}),
        (TokenizeCompletionRequest, {"prompt": "a"}),
    ],
    "/detokenize": [(DetokenizeRequest, {"tokens": [1]})],
}


def objects_and_lists() -> list[str]:
    """JSON texts as wide as the bounds on whole bodies let them be, or the bound on lists."""
    wide: list[Any] = []
    for value in (None, "a", 1, True):
        num_names = MAX_STRINGS // 2 - 20
        wide += [dict.fromkeys(map(str, range(num_names)), value), [value] * MAX_ELEMENTS]
    containers: list[Any] = [{}, [], {"type": "x"}, {"type": "function"}, {"name": "x"}, MESSAGE]
    for value in containers:
        number = MAX_CONTAINERS - 20 if isinstance(value, dict) else MAX_ELEMENTS
        wide += [dict.fromkeys(map(str, range(number)), value), [value] * number]
    return [json.dumps(value) for value in wide]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", list(REQUESTS))
def test_number_of_errors(path: str) -> None:
    wide = objects_and_lists()
    found = {}
    for model, needed in REQUESTS[path]:
        for field in [*model.model_fields, "unknown"]:
            for text in wide:
                found[f"{field} {text[:20]}"] = num_errors(path, model, needed, field, text)
    assert {key: number for key, number in found.items() if number > MAX_ERRORS} == {}
    assert any(found.values())


def num_errors(
    path: str, model: type[BaseModel], needed: dict[str, Any], field: str, text: str
) -> int:
    """Errors that vLLM lists for a body that the frontend passes on to it."""
    fields = {name: json.dumps(value) for name, value in needed.items()} | {field: text}
    body = "{" + ",".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    try:
        read_head(body.encode(), path)
    except ApiError:
        return 0
    try:
        model.model_validate(json.loads(body))
    except ValidationError as error:
        return error.error_count()
    except Exception:  # validators that trip: the adapter answers 400
        return 0
    return 0
