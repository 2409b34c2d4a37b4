"""``python -m benchmarks.value_bounds``: wrong elements in long lists, with and without the look.

Prints, for each body, the seconds until the frontend refuses it and those that vLLM's own models
take to validate it and to list what is wrong.
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

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.value_bounds import check_values

_MESSAGE = {"role": "user", "content": "a"}
_BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "240,000 numbers instead of messages": (ChatCompletionRequest, {"messages": [1] * 240_000}),
    "a message with 4,000 numbers instead of parts": (
        ResponsesRequest,
        {"input": [_MESSAGE | {"content": [1] * 4_000}]},
    ),
    "4,900 wrong items": (ResponsesRequest, {"input": [_MESSAGE | {"content": 1}] * 4_900}),
    "300 wrong items, 4 KB": (ResponsesRequest, {"input": [{"type": "x"}] * 300}),
    "200,000 token ids and a word": (CompletionRequest, {"prompt": [*[1] * 200_000, "a"]}),
    "500 messages, right": (ResponsesRequest, {"input": [_MESSAGE] * 500}),
}


def main() -> None:
    """Measure all; see the module."""
    check_values(json.dumps({"input": [_MESSAGE] * 10}).encode())  # its types are made once
    for name, (model, fields) in _BODIES.items():
        body = json.dumps(fields).encode()
        looked_s = _seconds(functools.partial(check_values, body))
        vllm_s = _seconds(functools.partial(_validate, model, body))
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
