"""The checks that need vLLM: options, architecture, quantisation, parsers, tokenizer, template.

A template is a program of the checkpoint's author. It runs in the frontends, for every model, so a
template that does not end on ordinary conversations is refused before: templates and tokenizers are
tried in forked children that may die.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import string
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase
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
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.hf import resolve_chat_template, safe_apply_chat_template
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import SYSTEM_PROMPT, with_defaults
from gpupoold.engine_options.parsing import parse_options
from gpupoold.errors import GpupoolError, Refused, UsageError
from gpupoold.system.process import die_with_parent, limit_use
from gpupoold.wire.messages import Inspect, ModelToLoad
from gpupoold.worker.engine.configuration import described, engine_config, model_config, refusal

_MESSAGES = [{"role": "user", "content": "x"}]
_LEAST_BODIES: tuple[tuple[type[BaseModel], dict[str, Any]], ...] = (
    (ChatCompletionRequest, {"messages": _MESSAGES}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponsesRequest, {"input": "x"}),
)

_GLOO = "gloo"

Part = Callable[[VllmConfig], ModelConfig | None]

MAX_RENDER_S = 1
"""Limit of CPU time for all conversations together, in seconds."""
_MAX_TOKENISE_S = 10
_MAX_MEMORY_BYTES = 1 << 30
_WAIT_S = 60.0
"""Limit by the clock, for a child that waits for a core."""
_MAX_REASON_BYTES = 500
_NUM_REPEATED = 1000
_CHARACTERS = (*string.printable, "é", "ж", "字", "\u0301", "\U0001f600", "\u200b")

_QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
_ANSWER = {"role": "assistant", "content": "It rains."}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Paris"}},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"rain": 1}'}
_IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
_SYSTEM = {"role": "system", "content": "Be brief."}
_CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION], None),
    ([_QUESTION], [_TOOL]),
    ([_SYSTEM, _QUESTION, _CALL, _RESULT, _ANSWER, _QUESTION], [_TOOL]),
    ([_IMAGE], None),
    ([{"role": "user", "content": "word " * 20_000}], None),
    ([_SYSTEM, *[_QUESTION, _ANSWER] * 50, _QUESTION], [_TOOL] * 5),
)


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
        if _build_error(make_config(), 1, part):
            continue
        for degree in degrees:
            if degree not in problems and (problem := _build_error(make_config(), degree, part)):
                problems[degree] = f"{whose}{problem}"
    return problems


def _drafter(config: VllmConfig) -> ModelConfig | None:
    """Return the configuration of a drafter with weights of its own, None without."""
    drafts = config.speculative_config
    has_drafter = drafts is not None and (drafts.use_eagle() or drafts.uses_draft_model())
    return drafts.draft_model_config if drafts is not None and has_drafter else None


def _build_error(config: VllmConfig, degree: int, part: Part) -> str:
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


def check_chat(model: ModelToLoad, config: ModelConfig, tokenizer: Any) -> None:
    """Render conversations by the model's template, and tokenise texts.

    A template may refuse a conversation, such as one with images.

    Raises:
        Refused: the template or the tokenizer exceeds a limit, or ends its process.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return  # Mistral's renders by itself
    given = load_chat_template(parse_options(model.engine).get("chat_template"))
    # Here, and not in the child: reading the files of a processor may take long.
    resolve_chat_template(tokenizer, given, None, model_config=config)
    if problem := _failure_of(lambda: _render(config, tokenizer, given), MAX_RENDER_S):
        raise Refused(
            f"{model.name}: the chat template {problem} for ordinary conversations",
            "use the original model's template: put it into the folder, or name its file by "
            "the option chat_template",
        )
    if problem := _failure_of(lambda: _tokenise(tokenizer), _MAX_TOKENISE_S):
        raise Refused(
            f"{model.name}: the tokenizer {problem} for texts of {_NUM_REPEATED:,} characters",
            "use the original model's tokenizer files",
        )


def _render(config: ModelConfig, tokenizer: Any, given: str | None) -> None:
    for conversation, tools in _CONVERSATIONS:
        try:
            safe_apply_chat_template(
                config,
                tokenizer,
                conversation,  # type: ignore[arg-type]
                tools=tools,
                chat_template=given,
                tokenize=False,
                add_generation_prompt=True,
            )
        except MemoryError:
            raise
        except Exception as error:
            if _is_memory_error(error):
                raise MemoryError from error


def _is_memory_error(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _tokenise(tokenizer: Any) -> None:
    for character in _CHARACTERS:
        text = character * _NUM_REPEATED
        try:
            tokenizer.encode(text)
        except BaseException as error:  # a panic of the tokenizers' library is no Exception
            reason = f"fails at the repeated {character!r}: {error}"
            raise _Failure(reason) from error


class _Failure(Exception):
    """A reason for a refusal, found in the child."""


def _failure_of(work: Callable[[], None], cpu_s: int) -> str:
    """Return what is wrong with ``work``, done in a child with limits; empty if nothing is."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(work, cpu_s, write_fd, parent_pid)
    os.close(write_fd)
    ended_fd = os.pidfd_open(pid)
    try:
        is_late = not select.select([ended_fd], [], [], _WAIT_S)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(ended_fd)
    with os.fdopen(read_fd, "rb") as result:
        reason = result.read(_MAX_REASON_BYTES).decode(errors="replace")
    if is_late:
        return f"takes more than {_WAIT_S:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"takes more than {cpu_s} s of CPU time"
    return reason or ("" if code == 0 else f"ends its process (status {code})")


def _child(work: Callable[[], None], cpu_s: int, result_fd: int, parent_pid: int) -> None:
    """Be the child; does not return."""
    reason = ""
    try:
        die_with_parent(parent_pid)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        limit_use(cpu_s, _MAX_MEMORY_BYTES)
        try:
            work()
        except MemoryError:
            reason = f"takes more than {_MAX_MEMORY_BYTES >> 30} GiB of memory"
        except _Failure as failure:
            reason = str(failure)
        with contextlib.suppress(OSError):
            os.write(result_fd, reason.encode(errors="replace")[:_MAX_REASON_BYTES])
    finally:
        os._exit(0)
