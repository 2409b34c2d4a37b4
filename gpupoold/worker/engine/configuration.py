"""vLLM's configuration of an engine, and vLLM's reasons against a model in words for users."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.engine_options.parsing import engine_options, media_limits
from gpupoold.equal_tokenizers import share_tokenizers
from gpupoold.errors import Failed, Refused
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.process import engine_arguments

if TYPE_CHECKING:
    from vllm.config import ModelConfig


# The fewest tokens that the CPU attention kernel accepts: small blocks waste less memory.
_CPU_BLOCK_TOKENS = 32
# Defaults that several engines on one GPU can afford: the sequences of a GPU of 32 GB or more,
# which has so many bytes of pages beside the reserve, and bytes for each sequence of a smaller GPU.
# An A10 has 64 sequences; beside an 8B model in 16 bits there is KV for 600 tokens of each. Small
# models on a small share of a GPU have the fewest.
_CUDA_SEQUENCES = 256
_LARGE_BYTES = 28 << 30
_BYTES_PER_SEQUENCE = 256 << 20
_FEWEST_SEQUENCES = 16
# The batches with a CUDA graph: 15 up to 256 tokens where vLLM has 35, on a small GPU the powers of
# two. Others are padded. Up to 150 tokens on an A100 and 300 on an H100 (operations per byte of
# memory bandwidth, latency/hardware.toml) a step takes as long as the weights are read, padded or
# not.
_CAPTURED_TOKENS = (
    *(1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32)),
    *range(256, 513, 64),
)
# Options that decide which batches have CUDA graphs.
_CAPTURES = (
    "compilation_config",
    "cudagraph_capture_sizes",
    "enforce_eager",
    "max_cudagraph_capture_size",
    "optimization_level",
    "speculative_config",
)
_WORKERS = {True: "emulated_worker.EmulatedWorker", False: "gpu_worker.CudaWorker"}

_MAX_CHARACTERS = 600
_MAX_LINES = 4
_MAX_NAMES = 3
_NAMES = re.compile(r"\W*'[^']*'(?:, '[^']*')*\W*")
_WANTED_LENGTH = re.compile(r"max seq len \((\d+)\)")
_POSSIBLE_LENGTH = re.compile(r"estimated maximum model length is (\d+)")
# The text that pydantic adds to the message of a validator.
_PYDANTIC = re.compile(
    r"^\d+ validation errors? for \w+\s+(?:Value error, )?|\s*\[type=\w+,.*$", re.S
)
# Errors whose text is shown without the type. The text of a KeyError, for example, is only the key.
_SPEAKING = (ValueError, RuntimeError, OSError)
_LOGS = "see `gpupool logs` for the engine's full message"
_OTHER_MODEL = "the weights and config.json are of different models; fetch the checkpoint again"
_GONE = "restore the files of the checkpoint, or remove the model and add it again"
_PLAIN = "use the model's unquantised checkpoint, or one in AWQ, GPTQ or FP8"
_NO_KERNEL = "serve the model on a GPU, or use another quantised version"
_LIST = "see vLLM's list of supported models"
_NO_TRITON = "serve the model on a GPU; a model with states: without speculative decoding"


# Known messages of vLLM, their rewording with the groups of the pattern as ``{0}``..., and a hint.
_KNOWN = [
    (re.compile(pattern, re.S), says, hint)
    for pattern, says, hint in (
        (
            r"Model architectures \[(.+?)\] (?:are not supported|failed to be inspected)",
            "the architecture {0} is not supported by vLLM",
            _LIST,
        ),
        (
            r"model type `(.+?)` but Transformers does not recognize",
            "the model type '{0}' is not known to Transformers or vLLM",
            _LIST,
        ),
        (
            r"Unknown quantization method: (.+?)\. ",
            "the quantisation '{0}' is not supported",
            _PLAIN,
        ),
        (
            r"(\S+) quantization is (?:currently )?not supported (?:in|on|for|by) ([\w ]+)",
            "the quantisation '{0}' is not supported on this device ({1})",
            _PLAIN,
        ),
        (
            r"No (\w+) MoE backend supports|Unsupported (FP8) MoE backend: NONE",
            "vLLM has no kernel of this device for quantised mixtures of experts ({0})",
            _NO_KERNEL,
        ),
        (
            r"static_scaled_fp8_quant\(\) expected at most 0",
            "FP8 with one scale for each tensor cannot be computed by vLLM's CPU build",
            "serve the model on a GPU, or use a version with one scale for each channel",
        ),
        (
            r"Failed to find a kernel that can implement the (\w+) (?:linear )?layer",
            "vLLM has no kernel of this device for {0} layers",
            _NO_KERNEL,
        ),
        (
            r"Cannot find any of (\[.+?\]) in the model's quantization config",
            "the quantization_config in config.json lacks {0}",
            "fetch the checkpoint again, or use another quantised version",
        ),
        (r"Cannot find any model weights with `(.+?)`", "there are no weights in {0}", _GONE),
        (r"No such file or directory: [\"']?([^\"'\n]+)", "the file {0} is missing", _GONE),
        (
            r"weights were not initialized from checkpoint: \{(.+?)\}",
            "the checkpoint lacks tensors: {0}",
            _OTHER_MODEL,
        ),
        (
            r"There is no module or parameter named '(.+?)' in (\w+)",
            "{1} has no parameter for the checkpoint's tensor '{0}'",
            _OTHER_MODEL,
        ),
        (
            r"Attempted to load weight \((.+?)\) into parameter \((.+?)\)",
            "a tensor of the checkpoint has the shape {0}, config.json requires {1}",
            _OTHER_MODEL,
        ),
        (
            r"User-specified max_model_len \((\d+)\) is greater than the derived "
            r"max_model_len \(.*?=(\d+)",
            "a context of {0} tokens exceeds the model's limit of {1}",
            "add the model with a smaller --max-len",
        ),
        (
            r"Unknown RoPE scaling type (\S+)",
            "the rope_scaling type '{0}' in config.json is not supported",
            "use a checkpoint with another type, or correct config.json",
        ),
        (
            # A launch of a Triton kernel, for which vLLM's CPU build has a placeholder.
            r"'function' object is not subscriptable",
            "a step needs a Triton kernel that vLLM's CPU build lacks",
            _NO_TRITON,
        ),
        (
            r"Validation error for field '(.+?)':\s*(?:\w+Error: )?(.+)",
            "config.json has an invalid value for '{0}': {1}",
            "fetch config.json of the original model again",
        ),
    )
]


def engine_config(
    model: ModelToLoad,
    *,
    is_emulated: bool,
    load_format: str | None = None,
    num_ranks: int = 1,
    page_bytes: int = _LARGE_BYTES,
) -> VllmConfig:
    """Return the configuration of a model on an emulated device or a GPU, or a group of these.

    ``page_bytes`` is the sum of a GPU's pages. Reads the small files of the checkpoint, no weights.

    Raises:
        GpupoolError: an option is wrong, or gpupool does not serve this kind of model.
        Exception: any error of vLLM about the model.
    """
    share_tokenizers()
    arguments: dict[str, Any] = {
        "model": model.path,
        "served_model_name": [model.name],
        "trust_remote_code": model.allow_remote_code,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "enforce_eager": is_emulated,
        "block_size": _CPU_BLOCK_TOKENS if is_emulated else None,
        # gpupool accounts for memory. vLLM's check must accept the little free memory: on a GPU
        # only the reserve is free, all other memory is pages.
        "gpu_memory_utilization": 0.01 if is_emulated else 0.001,
        "worker_cls": f"gpupoold.worker.engine.{_WORKERS[is_emulated]}",
        # Requests come with their processed images. vLLM's cache of these has a mirror in the one
        # frontend of an engine, and would fail with several frontends, or with another engine.
        "mm_processor_cache_gb": 0,
    }
    if not is_emulated:
        arguments |= _cuda_defaults(engine_options(model.engine) | engine_arguments(), page_bytes)
    arguments |= parallel_arguments(num_ranks)
    if load_format is not None:
        arguments["load_format"] = load_format
    arguments |= engine_options(model.engine)
    # Grammars begin after the reasoning, whose end the frontends' parser finds too.
    reasoning = found_parsers(Path(model.path), model.engine).reasoning
    arguments["reasoning_parser"] = reasoning.name or ""
    arguments |= engine_arguments()
    given = arguments.get("limit_mm_per_prompt")
    arguments["limit_mm_per_prompt"] = media_limits(given, model.max_images)
    # This usage context selects batches as large as in vLLM's server; the other default is for
    # old GPUs.
    config: VllmConfig = EngineArgs(**arguments).create_engine_config(
        UsageContext.OPENAI_API_SERVER
    )
    # The fused all-reduce and norm writes into FlashInfer's workspace without a check of the size,
    # which is that of the first model of the process.
    config.compilation_config.pass_config.fuse_allreduce_rms = False
    kind = config.model_config  # ``kind.architecture`` may be a substitute by vLLM
    check_kind(model.name, kind.architectures[0], kind)
    return config


def parallel_arguments(num_ranks: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engines on a group, none for a single GPU."""
    if num_ranks == 1:
        return {}
    executor = "gpupoold.worker.engine.vllm_process.RankExecutor"
    return {"tensor_parallel_size": num_ranks, "distributed_executor_backend": executor}


def model_config(model: ModelToLoad) -> ModelConfig:
    """Return the configuration of a model alone, without a device, as a frontend needs it."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.allow_remote_code,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
    }
    return EngineArgs(**arguments | engine_options(model.engine)).create_model_config()


def _cuda_defaults(given: Mapping[str, Any], page_bytes: int) -> dict[str, Any]:
    """Return the sizes of batches, unless ``given`` says otherwise.

    vLLM's defaults for GPUs of 70 GiB and more are 1,024 sequences and 51 graphs of up to 512
    tokens: for each engine 0.6 GiB of counts per sequence and vocabulary entry, as much for graphs,
    and seconds of each load.
    """
    is_large = page_bytes >= _LARGE_BYTES
    fitting = max(_FEWEST_SEQUENCES, page_bytes // _BYTES_PER_SEQUENCE)
    default = _CUDA_SEQUENCES if is_large else 1 << (fitting.bit_length() - 1)
    num_sequences = int(given.get("max_num_seqs") or default)
    if any(name in given for name in _CAPTURES):
        return {"max_num_seqs": num_sequences}
    largest = min(num_sequences, _CAPTURED_TOKENS[-1])
    sizes = [size for size in _CAPTURED_TOKENS if is_large or size.bit_count() == 1]
    sizes = [*(size for size in sizes if size < largest), largest]
    return {"max_num_seqs": num_sequences, "cudagraph_capture_sizes": sizes}


def check_kind(model: str, architecture: str, kind: ModelConfig) -> None:
    """Check that gpupool can serve a model of the class ``architecture``.

    Raises:
        Refused: the model neither generates text nor embeds, ranks or classifies text.
    """
    if kind.is_encoder_decoder:
        raise Refused(
            f"{model}: {architecture} is an encoder-decoder model, which is not supported",
            "use a decoder-only model",
        )
    if kind.runner_type not in ("generate", "pooling"):
        raise Refused(f"{model}: {architecture} neither generates nor pools text", _LIST)


def refusal(model: str, error: BaseException) -> Refused:
    """Return the error to show for a model whose engine could not be built."""
    text = str(error)
    if wanted := _WANTED_LENGTH.search(text):
        return _too_long(model, int(wanted[1]), _POSSIBLE_LENGTH.search(text))
    if "No available memory for the cache blocks" in text:
        return Refused(
            f"{model}: the weights leave no space for KV on the device",
            "use a smaller dtype or a larger device",
        )
    if known := _known(text):
        return Refused(f"{model}: {known[0]}", known[1])
    reason = described(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if any("tokeniz" in file.rpartition("site-packages")[2] for file in files[-4:]):
        return Refused(
            f"{model}: the tokenizer cannot be loaded: {reason}",
            "copy the tokenizer files of the original model into the folder",
        )
    if functions & {"weight_loader", "load_weights"}:
        return Refused(f"{model}: the weights do not match config.json: {reason}", _OTHER_MODEL)
    if "create_engine_config" in functions:
        return Refused(f"{model}: config.json cannot be used: {reason}", _LOGS)
    return Refused(f"{model}: vLLM cannot load the model: {reason}", _LOGS)


def failure(model: str, when: str, error: BaseException) -> Failed:
    """Return the error to show for a model that raised an error in a computation."""
    says, hint = _known(str(error)) or (described(error), _LOGS)
    return Failed(f"{model}: the engine failed {when}: {says}", hint)


def _known(text: str) -> tuple[str, str] | None:
    for pattern, says, hint in _KNOWN:
        if found := pattern.search(text):
            groups = (group for group in found.groups() if group is not None)
            return says.format(*map(_some, groups)), hint
    return None


def _too_long(model: str, wanted: int, possible: re.Match[str] | None) -> Refused:
    message = f"{model}: the KV of one request of {wanted} tokens does not fit beside the weights"
    if possible is None:
        return Refused(message, "use a smaller dtype or a larger device")
    return Refused(
        f"{message}; up to {possible[1]} tokens fit",
        f"add the model with --max-len {possible[1]} or less, or use a larger device",
    )


def described(error: BaseException) -> str:
    """Return an error's text, with the type if needed, and the place if the text is empty."""
    text, name = _useful(str(error)), type(error).__name__
    if text:
        return text if isinstance(error, _SPEAKING) else f"{name}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return f"{name} without a message"
    last = frames[-1]
    file = last.filename.rpartition("/")[2]
    return f"{name} in {last.name} ({file}, line {last.lineno}): {last.line or 'no source'}"


def _some(text: str) -> str:
    """Return the quoted names of a set or list, at most the first three; else the text."""
    if not _NAMES.fullmatch(text):
        return _useful(text)
    names = re.findall(r"'([^']*)'", text)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + more


def _useful(text: str) -> str:
    """Return the beginning of a message without pydantic's additions."""
    lines = [line.strip() for line in _PYDANTIC.sub("", text).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith("For further information")]
    return " ".join(useful[:_MAX_LINES])[:_MAX_CHARACTERS]
