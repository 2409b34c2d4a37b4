"""The checks that need vLLM: options, architecture, quantisation, parsers, tokenizer."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from gpupoold.engine_options.parsing import parse_options
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.engine.configuration import engine_config
from gpupoold.worker.engine.load_errors import refusal
from gpupoold.worker.inspection.presets import check_preset


def inspect(model: ModelToLoad, *, is_emulated: bool) -> None:
    """Check a model's configuration, options and tokenizer without the weights.

    Raises:
        GpupoolError: the reason why the model cannot be served.
    """
    _check_parsers(model)
    for preset in model.presets:
        check_preset(preset)
    try:
        config = engine_config(model, is_emulated=is_emulated)
        cached_tokenizer_from_config(config.model_config)
    except GpupoolError:
        raise
    except Exception as error:
        raise refusal(model.name, error) from error


def _check_parsers(model: ModelToLoad) -> None:
    parsed = parse_options(model.engine)
    for option, names in (
        ("tool_call_parser", ToolParserManager.list_registered()),
        ("reasoning_parser", ReasoningParserManager.list_registered()),
    ):
        given = parsed.get(option)
        if given and given != "none" and given not in names:
            raise UsageError(
                f"{model.name}: vLLM has no {option} {given!r}", f"there are {', '.join(names)}"
            )
