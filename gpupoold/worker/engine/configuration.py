"""vLLM's configuration of a model's engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from gpupoold.checkpoints.parsers import found_parsers
from gpupoold.engine_options.media import media_limits
from gpupoold.engine_options.parsing import engine_options
from gpupoold.wire.messages import ModelToLoad
from gpupoold.worker.engine.load_errors import check_kind
from gpupoold.worker.engine.process_groups import parallel_arguments
from gpupoold.worker.environment import engine_arguments

# The fewest tokens that the CPU attention kernel accepts: small blocks waste less memory.
_CPU_BLOCK_TOKENS = 32
# Defaults that several engines on one GPU can afford.
_CUDA_SEQUENCES = 256
_MAX_CAPTURED_TOKENS = 512
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


def engine_config(
    model: ModelToLoad, *, is_emulated: bool, load_format: str | None = None, num_ranks: int = 1
) -> VllmConfig:
    """Return the configuration of a model on an emulated device or a GPU, or a group of these.

    Reads the small files of the checkpoint, no weights.

    Raises:
        GpupoolError: an option is wrong, or gpupool does not serve this kind of model.
        Exception: any error of vLLM about the model.
    """
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
        arguments |= _cuda_defaults(engine_options(model.engine) | engine_arguments())
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


def model_config(model: ModelToLoad) -> ModelConfig:
    """Return the configuration of a model alone, without a device, as a frontend needs it."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.allow_remote_code,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
    }
    return EngineArgs(**arguments | engine_options(model.engine)).create_model_config()


def _cuda_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of batches, unless ``given`` says otherwise.

    vLLM's defaults for GPUs of 70 GiB and more are 1,024 sequences and graphs of up to 512 tokens:
    for each engine 0.6 GiB of counts per sequence and vocabulary entry, and as much for graphs.
    """
    num_sequences = int(given.get("max_num_seqs") or _CUDA_SEQUENCES)
    if any(name in given for name in _CAPTURES):
        return {"max_num_seqs": num_sequences}
    size = min(num_sequences, _MAX_CAPTURED_TOKENS)
    return {"max_num_seqs": num_sequences, "max_cudagraph_capture_size": size}
