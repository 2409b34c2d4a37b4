"""``python -m benchmarks.value_bounds``: cost of wrong elements in long lists.

Prints for each body the seconds until the frontend's check of values refuses the body, and the
seconds that vLLM's own models take to validate the body and to list the errors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from gpupoold.frontend.body import check_values
from gpupoold.frontend.conversations import message_types
from gpupoold.frontend.errors import ApiError

_MESSAGE = {"role": "user", "content": "a"}
_CHAT, _TEXT, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_MODELS: dict[str, type[BaseModel]] = {
    _CHAT: ChatCompletionRequest,
    _TEXT: CompletionRequest,
    _RESPONSES: ResponsesRequest,
}
_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "240,000 numbers instead of messages": (_CHAT, {"messages": [1] * 240_000}),
    "a message with 4,000 numbers instead of parts": (
        _RESPONSES,
        {"input": [_MESSAGE | {"content": [1] * 4_000}]},
    ),
    "4,900 wrong messages": (_CHAT, {"messages": [_MESSAGE | {"content": 1}] * 4_900}),
    "4,900 wrong items": (_RESPONSES, {"input": [_MESSAGE | {"content": 1}] * 4_900}),
    "300 wrong items, 4 KB": (_RESPONSES, {"input": [{"type": "x"}] * 300}),
    "200,000 token ids and a word": (_TEXT, {"prompt": [*[1] * 200_000, "a"]}),
    "500 messages, right": (_RESPONSES, {"input": [_MESSAGE] * 500}),
}


def main() -> None:
    """Measure all; see the module."""
    message_types()
    for name, (path, fields) in _BODIES.items():
        body = json.dumps(fields).encode()
        looked_s = _seconds(functools.partial(check_values, body, path))
        vllm_s = _seconds(functools.partial(_validate, _MODELS[path], body))
        print(f"{name:48}{looked_s * 1e3:10.1f} ms{vllm_s * 1e3:12.1f} ms")


def _seconds(act: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    with contextlib.suppress(ApiError):
        act()
    return time.perf_counter() - started_s


def _validate(model: type[BaseModel], body: bytes) -> None:
    try:
        model.model_validate(json.loads(body))
    except ValidationError as error:
        error.errors(include_url=False)


if __name__ == "__main__":
    main()
