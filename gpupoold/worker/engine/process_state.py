"""vLLM's state of the process: groups that all engines share, and what vLLM keeps of a model."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform

from gpupoold.worker.environment import set_group_environment
from gpupoold.worker.threads import HEAP, use_load_threads
from gpupoold.worker.weights.loading import register_snapshot_format

_SHARED_MEMORY = Path("/dev/shm")

_init_method = ""


def distributed_init_method() -> str:
    """Return how the ranks of this process's group have found each other."""
    return _init_method


def join_group(store: Path, rank: int, num_ranks: int, *, may_spin: bool = True) -> None:
    """Make the process groups of a group; ``store`` is an empty file that all ranks open.

    Returns when all ranks have called. Ranks on the CPU wait for each other in shared memory if
    they ``may_spin``, else in sockets: a rank that spins keeps another rank from its core.
    """
    global _init_method
    _init_method = f"file://{store}"
    # Part of the name of the shared memory; ranks with different names use sockets.
    leader = os.getppid() if rank else os.getpid()
    os.environ["VLLM_DIST_IDENT"] = f"gpupool-{leader}" + ("" if may_spin else f"-{rank}")
    set_group_environment()
    _ensure(_init_method, rank, num_ranks, local_rank=rank)
    copy_in_captures()
    if rank == 0:  # vLLM removes the names at an orderly end only
        for file in _SHARED_MEMORY.glob(f"gpupool-{leader}-*"):
            file.unlink()


def ensure_process_groups(init_method: str, local_rank: int) -> None:
    """Create groups of one rank, unless there are groups."""
    if not parallel_state.model_parallel_is_initialized():
        _ensure(init_method, 0, 1, local_rank)


def _ensure(init_method: str, rank: int, num_ranks: int, local_rank: int) -> None:
    """Create groups for every kind of model.

    vLLM creates the groups for the first model of a process, without the expert group if that model
    is dense; without any model vLLM creates all groups.
    """
    if current_platform.is_cuda():
        current_platform.set_device(torch.device(f"cuda:{local_rank}"))
    parallel = ParallelConfig(**parallel_arguments(num_ranks))
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(
            world_size=num_ranks,
            rank=rank,
            distributed_init_method=init_method,
            local_rank=local_rank,
            backend=current_platform.dist_backend,
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks)


def parallel_arguments(num_ranks: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engines on a group, none for a single GPU."""
    if num_ranks == 1:
        return {}
    executor = "gpupoold.worker.engine.engine.RankExecutor"
    return {"tensor_parallel_size": num_ranks, "distributed_executor_backend": executor}


def copy_in_captures() -> None:
    """Let captured all-reduces copy their input into vLLM's buffer, which all ranks have open.

    vLLM would open the memory of each captured input on all ranks by ``cudaIpcGetMemHandle``. These
    handles are never closed, although the memory is freed with the engine: undefined for CUDA. The
    table of 65,536 inputs would be full after some ten loads, because no entry is freed. And no
    handle exists for memory of ``cuMemCreate``, such as torch's expandable segments. Weights and KV
    are in such memory, but are no input of an all-reduce. vLLM itself copies in captures if graphs
    are in its cuMem pool.

    vLLM assumes one model per process, whose CUDA graphs live as long as the process. Here engines
    come and go, and step while another engine captures graphs.
    """
    custom = _custom_all_reduce()
    if custom is not None:
        custom._capture_registered = False  # a parameter of the constructor, which vLLM calls


@contextlib.contextmanager
def between_captures() -> Iterator[None]:
    """Let other engines step inside of this context, in the middle of a capture of graphs.

    vLLM marks its all-reduce as capturing from the first to the last graph. Outside of a graph a
    marked all-reduce returns memory without a result, because only warm-ups are expected there.
    """
    custom = _custom_all_reduce()
    if custom is None:
        yield
        return
    was_capturing = custom._IS_CAPTURING
    custom._IS_CAPTURING = False
    try:
        yield
    finally:
        custom._IS_CAPTURING = was_capturing


def _custom_all_reduce() -> Any:
    """Return vLLM's ``CustomAllreduce`` of the group; None on single GPUs and on the CPU."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    communicator = parallel_state.get_tp_group().device_communicator
    return getattr(communicator, "ca_comm", None)


def seed_sampling(seed: int) -> None:
    """Set the state of torch's generators before a step samples.

    Every rank samples, from equal logits. Requests without a seed draw from torch's generator of
    the process, whose state depends on all engines. So the leader seeds each sampling.
    """
    torch.manual_seed(seed)


def keep_generators() -> None:
    """Keep vLLM's loads, which run beside steps, from seeding the generators of the process."""
    # The CPU worker's module must not be imported for a GPU, see ``emulated_worker``.
    name = "gpu_worker" if current_platform.is_cuda() else "cpu_worker"
    module = importlib.import_module(f"vllm.v1.worker.{name}")
    setattr(module, "set_random_seed", lambda *_: None)  # noqa: B010


def whole_model(runner: Any) -> nn.Module:
    """Return a runner's model, together with the drafter's model if there is one.

    Modules that both share, such as embeddings, occur once in the result.
    """
    model: nn.Module = runner.get_model()
    draft: nn.Module | None = runner.get_draft_model()
    return model if draft is None else nn.ModuleList([model, draft])


def drop_runner(runner: Any) -> None:
    """Drop a runner's model and caches, and what vLLM keeps of the model for the process."""
    runner.compilation_config.static_forward_context.clear()
    if getattr(runner, "model", None) is not None:
        forget_compiled(whole_model(runner))
    for holder in ("model", "drafter", "speculator"):  # the drafter's holder by model runner
        if hasattr(runner, holder):
            setattr(runner, holder, None)
    runner.kv_caches.clear()


def forget_compiled(model: nn.Module) -> None:
    """Remove the hooks that vLLM registers with the compiler for each compiled module.

    The hooks are in a list of the process, which keeps the module alive with its code and CUDA
    graphs. vLLM does not remove the hooks.
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def start_load(*, skips_checkpoint: bool) -> None:
    """Prepare this process for building another engine."""
    use_load_threads()
    if skips_checkpoint:
        register_snapshot_format()
    # Not public: vLLM shares rotary modules through this cache. A relocated buffer of one model
    # must not appear in another model.
    rotary_embedding._ROPE_DICT.clear()
    HEAP.freeze()
