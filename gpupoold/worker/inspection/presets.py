"""Checks of presets by the classes of vLLM's API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import SYSTEM_PROMPT, with_defaults
from gpupoold.errors import UsageError

_MESSAGES = [{"role": "user", "content": "x"}]
_LEAST_BODIES: tuple[tuple[type[BaseModel], dict[str, Any]], ...] = (
    (ChatCompletionRequest, {"messages": _MESSAGES}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponsesRequest, {"input": "x"}),
)


def check_preset(preset: Preset) -> None:
    """Check that each default is a field of some request, with a value that the request accepts.

    Raises:
        UsageError: a name is unknown, or a value wrong.
    """
    names = {name.partition(".")[0] for name in preset.defaults} - {SYSTEM_PROMPT}
    known = {name for kind, _ in _LEAST_BODIES for name in kind.model_fields}
    if unknown := sorted(names - known):
        raise UsageError(
            f"{preset.name}: requests have no field {', '.join(map(repr, unknown))}",
            "use names of vLLM's API, such as temperature or max_tokens",
        )
    for kind, body in _LEAST_BODIES:
        fields = {
            name: value
            for name, value in preset.defaults.items()
            if name.partition(".")[0] in kind.model_fields
        }
        try:
            request = kind.model_validate(with_defaults(body, fields))
            if isinstance(request, ChatCompletionRequest):
                request.to_sampling_params(1, {})
        except VLLMValidationError as error:
            raise UsageError(f"{preset.name}: {str(error)[:300]}", "use another value") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UsageError(
                f"{preset.name}: {place}: {first['msg'][:300]}", "use another value"
            ) from error
