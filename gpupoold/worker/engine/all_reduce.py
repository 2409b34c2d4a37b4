"""vLLM's all-reduces on a group of GPUs, which all engines of a process share.

vLLM assumes one model per process, whose CUDA graphs live as long as the process. Here engines come
and go, and step while another engine captures graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.distributed import parallel_state


def copy_in_captures() -> None:
    """Let captured all-reduces copy their input into vLLM's buffer, which all ranks have open.

    vLLM would open the memory of each captured input on all ranks by ``cudaIpcGetMemHandle``. These
    handles are never closed, although the memory is freed with the engine: undefined for CUDA. The
    table of 65,536 inputs would be full after some ten loads, because no entry is freed. And no
    handle exists for memory of ``cuMemCreate``, such as torch's expandable segments. Weights and KV
    are in such memory, but are no input of an all-reduce. vLLM itself copies in captures if graphs
    are in its cuMem pool.
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
