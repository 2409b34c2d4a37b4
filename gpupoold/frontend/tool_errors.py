"""The error of a model without a tool parser, in the words of gpupool."""

from __future__ import annotations

from typing import Any

_OPTION = "--tool-call-parser"


def explain_missing_parser(renderer: Any, model: str) -> None:
    """Let errors of ``renderer`` name the options of ``gpupool`` in place of vLLM's.

    ``renderer`` is vLLM's ``OnlineRenderer``, which creates the error while rendering a chat; the
    request's own fields alone do not show whether tools are needed.
    """
    create = renderer.create_error_response

    def explained(message: str | Exception, *args: Any, **kwargs: Any) -> Any:
        is_missing = isinstance(message, str) and _OPTION in message
        return create(_missing(model) if is_missing else message, *args, **kwargs)

    renderer.create_error_response = explained


def _missing(model: str) -> str:
    return (
        f"The model `{model}` has no tool parser, because none was found for its chat template. "
        'Send no `tools`, or `"tool_choice": "none"`. The operator can choose a parser: '
        f"`gpupool set {model} --engine tool-call-parser=NAME`, or a chat template with the "
        f"markup of a parser: `gpupool set {model} --engine chat-template=@FILE`."
    )
