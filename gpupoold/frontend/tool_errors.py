"""Errors of vLLM in the words of gpupool, where vLLM names its own options and variables."""

from __future__ import annotations

from typing import Any

_TOOL_OPTION = "--tool-call-parser"
_STORE_VARIABLE = "VLLM_ENABLE_RESPONSES_API_STORE"
_NO_BACKGROUND = (
    "Responses are not stored here, so `background` is not supported: leave the field out. For "
    "work without a waiting client there are batches, `/v1/batches`."
)


def explain_missing_parser(renderer: Any, model: str) -> None:
    """Let errors of ``renderer`` name the options of ``gpupool`` in place of vLLM's.

    ``renderer`` is vLLM's ``OnlineRenderer``, which creates the error while rendering a chat; the
    request's own fields alone do not show whether tools are needed.
    """
    _replace_error(renderer, _TOOL_OPTION, _missing(model))


def explain_background(serving: Any) -> None:
    """Let errors of ``serving``, vLLM's ``OpenAIServingResponses``, name no variable of vLLM."""
    _replace_error(serving, _STORE_VARIABLE, _NO_BACKGROUND)


def _replace_error(maker: Any, part: str, text: str) -> None:
    """Let ``maker`` create errors with ``text`` in place of texts that contain ``part``."""
    create = maker.create_error_response

    def explained(message: str | Exception, *args: Any, **kwargs: Any) -> Any:
        is_meant = isinstance(message, str) and part in message
        return create(text if is_meant else message, *args, **kwargs)

    maker.create_error_response = explained


def _missing(model: str) -> str:
    return (
        f"The model `{model}` has no tool parser, because none was found for its chat template. "
        'Send no `tools`, or `"tool_choice": "none"`. The operator can choose a parser: '
        f"`gpupool set {model} --engine tool-call-parser=NAME`, or a chat template with the "
        f"markup of a parser: `gpupool set {model} --engine chat-template=@FILE`."
    )
