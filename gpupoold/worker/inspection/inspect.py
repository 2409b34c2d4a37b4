"""The checks that need vLLM: options, architecture, quantisation, parsers, tokenizer, template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models import supports_lora
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.engine_options.parsing import parse_options
from gpupoold.errors import GpupoolError, Refused, UsageError
from gpupoold.wire.messages import Inspect, ModelToLoad
from gpupoold.worker.engine.configuration import engine_config, model_config
from gpupoold.worker.engine.load_errors import refusal
from gpupoold.worker.inspection.chat import check_chat
from gpupoold.worker.inspection.division import undivided
from gpupoold.worker.inspection.presets import check_own_defaults, check_preset


def inspect(order: Inspect) -> dict[int, str]:
    """Check a model's configuration, options and tokenizer without the weights.

    Return the ``degrees`` of groups of GPUs that cannot divide the model, with the reason.

    Raises:
        GpupoolError: the reason why the model cannot be served.
    """
    model, is_emulated = order.model, order.is_emulated
    _check_parsers(model)
    for preset in model.presets:
        check_preset(preset)
    try:
        if order.only_chat:
            kind = model_config(model)
            check_own_defaults(model.name, kind)
            check_chat(model, kind, cached_tokenizer_from_config(kind))
            return {}
        config = engine_config(model, is_emulated=is_emulated)
        check_own_defaults(model.name, config.model_config)
        if config.lora_config is not None:
            _check_adapter_support(model.name, config.model_config, is_emulated=is_emulated)
        tokenizer = cached_tokenizer_from_config(config.model_config)
        check_chat(model, config.model_config, tokenizer)
        _build_parsers(model, config.model_config, tokenizer)
        return undivided(lambda: engine_config(model, is_emulated=is_emulated), order.degrees)
    except GpupoolError:
        raise
    except Exception as error:
        raise refusal(model.name, error) from error


def _check_adapter_support(name: str, config: ModelConfig, *, is_emulated: bool) -> None:
    model_class, architecture = get_model_architecture(config)
    if not supports_lora(model_class):
        raise Refused(
            f"{name}: vLLM's {architecture} takes no LoRA adapters",
            "merge the adapter into its base with peft, and add the result as a model",
        )
    if is_emulated and config.get_num_experts():
        raise Refused(
            f"{name}: vLLM's CPU build runs no LoRA adapters of mixture-of-experts models",
            "use a GPU, or merge the adapter into its base and add the result as a model",
        )


def _build_parsers(model: ModelToLoad, config: ModelConfig, tokenizer: Any) -> None:
    """Build the parsers for the tokenizer as the API does."""
    found = found_parsers(Path(model.path), model.engine)
    ParserManager.get_parser(
        found.tool.name,
        found.reasoning.name,
        enable_auto_tools=found.tool.name is not None,
        model_name=model.name,
        is_harmony=config.hf_config.model_type == "gpt_oss",
        tokenizer=tokenizer,
    )


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
