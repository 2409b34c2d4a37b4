"""How vLLM reads weights: by several threads, and into host memory where that is possible.

vLLM allocates the parameters of a model empty, here in host memory, and reads the checkpoint into
them. Small tensors that vLLM computes, such as tables of rotary embeddings, it computes on the
device, as without gpupool. The checkpoint of an unquantized dense model holds the weights as the
kernels read them: the parameters of such a model become views of the snapshot before vLLM reads the
checkpoint, and a snapshot that exists already is not even written.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from gpupoold.errors import ServerError
from gpupoold.memory import libc
from gpupoold.worker.weights.stages import replaced

# Smaller tensors may take part in computations on the device while the model is created.
LEAST_BYTES = 1 << 20
# Threads that read a checkpoint, the bytes that each reads at a time, and all together ahead.
_NUM_READERS = 4
_READ_BYTES = 16 << 20
_AHEAD_BYTES = 512 << 20
# Kinds of parameters that vLLM leaves as they are after reading them.
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class HostLoadFails(ServerError):
    """vLLM cannot make or prepare a model whose weights are in host memory."""


def why_on_device(config: VllmConfig, *load_formats: str) -> str:
    """Return why a load needs device memory for all weights at once, as far as the settings tell.

    Empty if the load needs memory for one module at a time.
    """
    model, load, drafts = config.model_config, config.load_config, config.speculative_config
    has_own = has_drafter(config)
    reasons = {
        "vLLM has an own way to read its format": load.load_format not in load_formats
        or load.device is not None
        or model.quantization == "torchao",
        "the Transformers backend of vLLM makes its weights": model.using_transformers_backend(),
        "it has a drafter and adapters": has_own and config.lora_config is not None,
        "its drafter computes while it is loaded": has_own and drafts.parallel_drafting,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def has_drafter(config: VllmConfig) -> bool:
    """Return whether a model is loaded with another model, which drafts tokens."""
    drafts = config.speculative_config
    # Drafts of n-grams have the configuration of the model itself.
    return (
        drafts is not None
        and drafts.draft_model_config is not None
        and (drafts.draft_model_config is not config.model_config)
    )


def stays_as_read(module: nn.Module) -> bool:
    """Return whether vLLM leaves a module's weights as they are in the checkpoint."""
    if is_deferred_attention_layer(module):  # latent attention absorbs the projections it has
        return next(module.parameters(), None) is None
    method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
    is_plain = method is None or type(method) in _PLAIN
    return is_plain and not (isinstance(weight, torch.Tensor) and _is_packed(weight))


def prepares_itself(model: nn.Module) -> bool:
    """Return whether the class of a model prepares the weights of all modules together."""
    return hasattr(model, "process_weights_after_loading")


def _is_packed(weight: torch.Tensor) -> bool:
    """Return whether vLLM packs a weight: on a CPU, of convolutions in bfloat16."""
    return current_platform.is_cpu() and weight.ndim > 2 and weight.dtype is torch.bfloat16


@contextlib.contextmanager
def on_host(
    config: VllmConfig,
    created: Callable[[nn.Module, Collection[int]], None],
    loaded: Callable[[nn.Module], None],
    on_device: Callable[[nn.Module, torch.device], contextlib.AbstractContextManager[nn.Module]],
) -> Iterator[None]:
    """Let vLLM create models inside the context with empty parameters in host memory.

    ``created`` is called with a model before its weights are read, and with the addresses of the
    storages in host memory. vLLM prepares a module that it has read inside ``on_device``.
    ``loaded`` is called before slots for adapters are made. One model is loaded at a time.

    Raises:
        HostLoadFails: torch cannot do with weights in host memory what vLLM asks for.
    """
    create, load = BaseModelLoader.create_model, BaseModelLoader.load_model
    device = torch.device(config.device_config.device)

    def create_on_host(loader: BaseModelLoader, *arguments: Any, **options: Any) -> nn.Module:
        with _failing():
            with device, _EmptyOnHost() as made:
                model = create(loader, *arguments, **options)
            created(model, made.addresses)
        return model

    def load_on_host(loader: BaseModelLoader, *arguments: Any, **options: Any) -> nn.Module:
        model = load(loader, *arguments, **options)
        if config.lora_config is not None:  # slots are where the weights seem to be
            loaded(model)
        return model

    @contextlib.contextmanager
    def prepare(module: nn.Module, target: torch.device) -> Iterator[nn.Module]:
        with _failing(), on_device(module, target):
            yield module

    config.load_config.device = "cpu"  # vLLM leaves weights there, and moves none for a check
    try:
        with (
            replaced(BaseModelLoader, "create_model", create_on_host),
            replaced(BaseModelLoader, "load_model", load_on_host),
            replaced(loader_utils, "device_loading_context", prepare),
        ):
            yield
    finally:
        config.load_config.device = None


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Turn errors of torch inside the context into HostLoadFails."""
    try:
        yield
    except RuntimeError as error:
        raise HostLoadFails(f"a load in host memory failed: {error}") from error


class _EmptyOnHost(TorchFunctionMode):
    """A torch function mode that allocates large tensors without content in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func not in (torch.empty, torch.zeros) or options.get("device") is not None:
            return func(*args, **options)
        made = func(*args, **options | {"device": "cpu"})
        if made.nbytes < LEAST_BYTES:
            return func(*args, **options)
        self.addresses.add(made.data_ptr())
        return made


@contextlib.contextmanager
def reading_ahead() -> Iterator[None]:
    """Let threads read checkpoints ahead of vLLM's thread inside the context."""
    all_weights = DefaultModelLoader.get_all_weights

    def read_by_threads(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return read_ahead(all_weights(*arguments))

    with replaced(DefaultModelLoader, "get_all_weights", read_by_threads):
        yield


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
