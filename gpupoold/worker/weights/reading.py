"""How vLLM reads weights: by several threads, and in place where that is possible.

Weights in place are read straight into a host snapshot, without memory of the device. The
checkpoint of an unquantised dense model holds the weights as the kernels read them. vLLM allocates
the parameters of such a model empty; they become views of the snapshot before vLLM reads the
checkpoint. A snapshot that exists already is not even written. All that vLLM computes, such as
tables of rotary embeddings, it computes on the device, as without gpupool.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from gpupoold.memory import libc
from gpupoold.worker.weights.tensors import host_bytes

# Smaller tensors may take part in computations on the device while the model is created.
_LEAST_BYTES = 1 << 20
# Threads that read a checkpoint, the bytes that each reads at a time, and all together ahead.
_NUM_READERS = 4
_READ_BYTES = 16 << 20
_AHEAD_BYTES = 512 << 20
# Kinds of parameters that vLLM leaves as they are after reading them.
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def may_be_in_place(config: VllmConfig, *load_formats: str) -> bool:
    """Return whether the weights of a model may be read in place, as far as the settings tell."""
    if config.load_config.load_format not in load_formats or config.load_config.device is not None:
        return False
    model = config.model_config
    return (
        config.parallel_config.world_size == 1
        and config.speculative_config is None
        and config.lora_config is None
        and model.quantization is None
        and not (model.is_moe or model.use_mla or model.using_transformers_backend())
    )


def is_plain(model: nn.Module) -> bool:
    """Return whether vLLM leaves all weights as they are in the checkpoint."""
    if hasattr(model, "process_weights_after_loading"):
        return False
    for module in model.modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        is_plain = method is None or type(method) in _PLAIN
        if not is_plain or (isinstance(weight, torch.Tensor) and _is_packed(weight)):
            return False
    return True


def _is_packed(weight: torch.Tensor) -> bool:
    """Return whether vLLM packs a weight: on a CPU, of convolutions in bfloat16."""
    return current_platform.is_cpu() and weight.ndim > 2 and weight.dtype is torch.bfloat16


@contextlib.contextmanager
def creating(config: VllmConfig, created: Callable[[nn.Module], None]) -> Iterator[None]:
    """Let vLLM create models inside the context with empty parameters in host memory.

    ``created`` is called with a model before its weights are read. One model is loaded at a time.
    """
    create = BaseModelLoader.create_model
    device = torch.device(config.device_config.device)

    def create_on_host(loader: BaseModelLoader, *arguments: Any, **options: Any) -> nn.Module:
        with device, _EmptyOnHost():
            model = create(loader, *arguments, **options)
        created(model)
        return model

    BaseModelLoader.create_model = create_on_host  # type: ignore[method-assign]
    config.load_config.device = "cpu"  # vLLM leaves weights there, and moves none for a check
    try:
        yield
    finally:
        BaseModelLoader.create_model = create  # type: ignore[method-assign]
        config.load_config.device = None


def at_host(address: int, source: torch.UntypedStorage) -> torch.Tensor:
    """Return host memory at ``address`` as the bytes of a storage, with what is in the storage."""
    target = host_bytes(address, source.nbytes())
    if not libc.is_untouched(source.data_ptr(), source.nbytes()):
        target.copy_(torch.empty(0, dtype=torch.int8).set_(source))  # type: ignore[call-overload]
    return target


class _EmptyOnHost(TorchFunctionMode):
    """A torch function mode that allocates large tensors without content in host memory."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is not torch.empty or options.get("device") is not None:
            return func(*args, **options)
        made = func(*args, **options | {"device": "cpu"})
        return made if made.nbytes >= _LEAST_BYTES else func(*args, **options)


@contextlib.contextmanager
def reading_ahead() -> Iterator[None]:
    """Let threads read checkpoints ahead of vLLM's thread inside the context."""
    all_weights = DefaultModelLoader.get_all_weights

    def read_by_threads(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return read_ahead(all_weights(*arguments))

    setattr(DefaultModelLoader, "get_all_weights", read_by_threads)  # noqa: B010
    try:
        yield
    finally:
        setattr(DefaultModelLoader, "get_all_weights", all_weights)  # noqa: B010


def read_ahead(
    weights: Iterable[tuple[str, torch.Tensor]], num_bytes: int = _AHEAD_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of mapped files while threads read up to ``num_bytes`` of the next ones.

    vLLM's thread would wait for the disk at each page in turn. The threads of vLLM's
    ``enable_multithread_load`` only map the files.
    """
    waiting: deque[tuple[tuple[str, torch.Tensor], list[Future[None]]]] = deque()
    num_ahead = 0
    with ThreadPoolExecutor(_NUM_READERS, "read") as threads:
        for item in weights:
            _, tensor = item
            end = tensor.data_ptr() + (tensor.nbytes if tensor.device.type == "cpu" else 0)
            pieces = range(tensor.data_ptr(), end, _READ_BYTES)
            waiting.append((item, [threads.submit(_populate, piece, end) for piece in pieces]))
            num_ahead += tensor.nbytes
            while num_ahead > num_bytes:
                item, reads = waiting.popleft()
                num_ahead -= item[1].nbytes
                wait(reads)
                yield item
        for item, reads in waiting:
            wait(reads)
            yield item


def _populate(address: int, end: int) -> None:
    """Read a piece of a mapped file; a failure shows when vLLM reads the tensor."""
    start = address - address % mmap.PAGESIZE
    with contextlib.suppress(OSError):  # also of a kernel before 5.14
        libc.madvise(start, min(address + _READ_BYTES, end) - start, libc.MADV_POPULATE_READ)
