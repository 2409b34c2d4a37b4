"""Changes of vLLM's handlers, in the state of a model's application.

The handlers get gpupool's bounds, names and messages; requests are answered as by vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from gpupoold.frontend.anthropic_errors import name_errors_of_streams
from gpupoold.frontend.large_answers import make_large_answers_apart
from gpupoold.frontend.logprob_requests import limit_beams
from gpupoold.frontend.model_names import name_as_requested
from gpupoold.frontend.pooling_bounds import bound_pooling
from gpupoold.frontend.request_ids import name_responses
from gpupoold.frontend.tool_errors import explain_background, explain_missing_parser


def change_handlers(state: Any, model_config: Any) -> None:
    """Change the handlers of a new application."""
    explain_missing_parser(state.online_renderer, model_config.served_model_name)
    # Pooling models have no such handlers.
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        name_responses(responses)
        explain_background(responses)
    bound_pooling(state, model_config.max_model_len, VLLMValidationError)
    make_large_answers_apart(state)
    limit_beams(state)
    name_as_requested(state.openai_serving_models)
    if (messages := getattr(state, "anthropic_serving_messages", None)) is not None:
        name_errors_of_streams(messages)
