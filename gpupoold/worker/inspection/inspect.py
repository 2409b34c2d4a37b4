"""The checks that need vLLM: options, architecture, quantisation, parsers, tokenizer, template."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import BaseModel, ValidationError
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader.utils import get_model_architecture, initialize_model
from vllm.model_executor.models import supports_lora
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import SYSTEM_PROMPT, with_defaults
from gpupoold.engine_options.parsing import parse_options
from gpupoold.errors import GpupoolError, Refused, UsageError
from gpupoold.wire.messages import Inspect, ModelToLoad
from gpupoold.worker.engine.configuration import engine_config, model_config
from gpupoold.worker.engine.load_errors import described, refusal
from gpupoold.worker.inspection.chat import check_chat

_MESSAGES = [{"role": "user", "content": "x"}]
_LEAST_BODIES: tuple[tuple[type[BaseModel], dict[str, Any]], ...] = (
    (ChatCompletionRequest, {"messages": _MESSAGES}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponsesRequest, {"input": "x"}),
)

_GLOO = "gloo"

Part = Callable[[VllmConfig], ModelConfig | None]


def inspect(order: Inspect) -> dict[int, str]:
    """Check a model's configuration, options and tokenizer without the weights.

    Return the ``degrees`` of groups of GPUs that cannot divide the model, with the reason.
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


def undivided(make_config: Callable[[], VllmConfig], degrees: Iterable[int]) -> dict[int, str]:
    """Return the ``degrees`` that cannot divide a model or its drafter, with vLLM's reason.

    ``make_config`` returns a new configuration of the model for one GPU. A model that cannot be
    built without memory for one GPU is not judged, nor is such a drafter.

    vLLM finds a dimension that is not divisible, or quantised blocks that an equal part would cut,
    only while a model's modules are built. Modules on PyTorch's ``meta`` device have shapes and no
    memory.
    """
    degrees = list(degrees)
    if not degrees:
        return {}
    _create_groups()
    problems: dict[int, str] = {}
    for whose, part in (("", lambda config: config.model_config), ("the drafter: ", _drafter)):
        if _problem(make_config(), 1, part):
            continue
        for degree in degrees:
            if degree not in problems and (problem := _problem(make_config(), degree, part)):
                problems[degree] = f"{whose}{problem}"
    return problems


def _drafter(config: VllmConfig) -> ModelConfig | None:
    """Return the configuration of a drafter with weights of its own, None without."""
    drafts = config.speculative_config
    has_drafter = drafts is not None and (drafts.use_eagle() or drafts.uses_draft_model())
    return drafts.draft_model_config if drafts is not None and has_drafter else None


def _problem(config: VllmConfig, degree: int, part: Part) -> str:
    """Return the error of building the first GPU's part of a model; empty without an error."""
    model = part(config)
    if model is None:
        return ""
    # Not public: the group whose size the modules read. No collective runs while they are built.
    group = parallel_state.get_tp_group()
    config.parallel_config.tensor_parallel_size = degree
    try:
        model.verify_with_parallel_config(config.parallel_config)
        group.world_size = degree
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config, model_config=model)
    except Exception as error:
        return described(error)
    finally:
        group.world_size = 1
    return ""


def _create_groups() -> None:
    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{Path(tempfile.mkdtemp()) / 'groups'}",
            local_rank=0,
            backend=_GLOO,
        )
        parallel_state.initialize_model_parallel()
