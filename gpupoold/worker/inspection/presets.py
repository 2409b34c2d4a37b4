"""Checks of the defaults of requests by vLLM's classes: presets, and the checkpoint's own."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import SYSTEM_PROMPT, with_defaults
from gpupoold.errors import Refused, UsageError

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


def check_own_defaults(name: str, config: ModelConfig) -> None:
    """Check that the engine accepts a request that has the checkpoint's defaults.

    Raises:
        Refused: it does not, so that it would refuse all requests.
    """
    if config.runner_type != "generate":
        return
    try:
        params = SamplingParams(**config.get_diff_sampling_param())
        params.update_from_generation_config(config.try_get_generation_config())
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except Exception as error:
        raise Refused(
            f"{name}: generation_config.json has defaults that vLLM refuses: {str(error)[:300]}",
            "use the original model's file, or set the option override_generation_config",
        ) from error
