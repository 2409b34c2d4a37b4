"""Tensors over memory that torch does not own, and the move of a model's tensors there.

vLLM loads and post-processes a model in ordinary torch memory. The resulting storages are the
snapshot; parameters, buffers and other tensors of the modules then become views of the address
range with the same shapes and strides. Slots of adapters are no part of the snapshot: they follow
in the address range.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from gpupoold.memory import libc
from gpupoold.memory.device import Device

_ALIGNMENT_BYTES = 256

_FIRST = -1

_BASE_LAYER = "base_layer"


def over(device: Device, address: int, num_bytes: int) -> torch.Tensor:
    """Return an int8 tensor at a device address, whose pages may be mapped later."""
    if device.is_host_addressable:
        buffer = (ctypes.c_int8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)
    return at_pointer(address, num_bytes, torch.device("cuda", torch.cuda.current_device()))


def spoil(device: Device, address: int, num_bytes: int) -> None:
    """Overwrite bytes, after the kernels launched before; floating-point numbers become NaN."""
    over(device, address, num_bytes).fill_(-1)


def at_pointer(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return an int8 tensor over memory of ``device``, without ownership.

    Array interface and DLPack query CUDA about the pointer, which fails for addresses without
    pages; so a storage is made from the pointer directly.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.int8, device=device).set_(storage)


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Return an int8 tensor over host memory."""
    return torch.frombuffer((ctypes.c_int8 * num_bytes).from_address(address), dtype=torch.int8)


class DecoderLayers(NamedTuple):
    """The decoder layers: the module list with the most bytes.

    Weights outside of the decoder layers come first, then the layers, then the head that makes
    tokens, unless the head shares its weights with the embedding. The order of the layers is a
    guess from their numbers, which an engine checks before a step begins without all weights
    (:mod:`gpupoold.worker.turns.self_check`).
    """

    prefix: str
    num_layers: int

    @classmethod
    def of(cls, model: nn.Module) -> DecoderLayers:
        """Find the decoder layers of a model; of lists of equal size, the outermost."""
        largest, most_bytes = NO_LAYERS, 0
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList) or not name or len(module) < 2:
                continue
            num_bytes = sum(parameter.nbytes for parameter in module.parameters())
            if num_bytes > most_bytes:
                largest, most_bytes = cls(f"{base_name(name)}.", len(module)), num_bytes
        return largest

    def index_of(self, name: str) -> int | None:
        """Return the layer to which a module or tensor belongs, None if to no layer."""
        if not self.num_layers or not name.startswith(self.prefix):
            return None
        return int(name.removeprefix(self.prefix).partition(".")[0])


NO_LAYERS = DecoderLayers("", 0)


class NeedOrder:
    """The rank of each storage of a model: -1, the first layer that uses the storage, or last."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = DecoderLayers.of(model)
        self._heads = {
            base_name(name)
            for name, module in model.named_modules()
            if isinstance(module, ParallelLMHead)
        }
        self._ranks: dict[int, int] = {}
        parameters = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        for name, tensor in chain(parameters, buffers, loose_tensors(model)):
            address = tensor.untyped_storage().data_ptr()
            rank = self._rank_of_name(base_name(name))
            self._ranks[address] = min(rank, self._ranks.get(address, rank))

    def rank(self, tensor: torch.Tensor) -> int:
        """Return the rank of a tensor's storage; unknown storages come first."""
        return self._ranks.get(tensor.untyped_storage().data_ptr(), _FIRST)

    def _rank_of_name(self, name: str) -> int:
        if (layer := self.layers.index_of(name)) is not None:
            return layer
        is_of_head = name.rpartition(".")[0] in self._heads
        return self.layers.num_layers if is_of_head else _FIRST


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The tensors of a model, and the offset of each tensor's storage in the address range.

    ``layer_ends`` has, for each of the decoder ``layers``, the bytes from the start on that contain
    this layer, all layers before and everything that steps need before the layers.
    """

    tensors: tuple[torch.Tensor, ...]
    offsets: dict[int, int]  # address of a storage → offset in the address range
    num_bytes: int
    digest: str
    layers: DecoderLayers = NO_LAYERS
    layer_ends: tuple[int, ...] = ()


def plan_layout(model: torch.nn.Module) -> WeightLayout:
    """Lay out the storages of all parameters, buffers and loose tensors in the order of need.

    Two loads of one checkpoint with one configuration have the same digest, so each can use the
    other's snapshot. The digest also covers state outside of the snapshot, so that an incomplete
    snapshot is not mistaken for a complete one. Support for adapters does not change the digest.
    """
    order = NeedOrder(model)
    named = sorted(_named_tensors(model), key=lambda pair: order.rank(pair[1]))
    layout = _lay_out(named, loose_digest(model))
    return replace(layout, layers=order.layers, layer_ends=_layer_ends(layout, order))


def plan_slots(model: torch.nn.Module) -> WeightLayout:
    """Lay out the slots of adapters; empty for a model without support for adapters."""
    return _lay_out(slot_tensors(model), "")


def _lay_out(named: Iterable[tuple[str, torch.Tensor]], loose: str) -> WeightLayout:
    found: dict[int, torch.Tensor] = {}
    offsets: dict[int, int] = {}
    num_bytes = 0
    digest = hashlib.sha256()
    for name, tensor in named:
        storage = tensor.untyped_storage()
        if id(tensor) in found or not storage.nbytes():
            continue
        found[id(tensor)] = tensor
        if storage.data_ptr() not in offsets:
            offsets[storage.data_ptr()] = num_bytes
            num_bytes += -(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        place = (offsets[storage.data_ptr()], storage.nbytes(), tensor.storage_offset())
        shape = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
        digest.update(repr((name, place, shape)).encode())
    digest.update(loose.encode())
    return WeightLayout(tuple(found.values()), offsets, num_bytes, digest.hexdigest())


def _layer_ends(layout: WeightLayout, order: NeedOrder) -> tuple[int, ...]:
    ends = [0] * order.layers.num_layers
    for tensor in layout.tensors:
        storage, first = tensor.untyped_storage(), max(0, order.rank(tensor))
        if first < len(ends):
            end = layout.offsets[storage.data_ptr()] + storage.nbytes()
            ends[first] = max(ends[first], end)
    return tuple(accumulate(ends, max))


def copy_out(
    layout: WeightLayout,
    snapshot_address: int,
    device: Device,
    on_host: MutableMapping[int, Any],
) -> None:
    """Write the snapshot: each storage at its offset in host memory.

    ``on_host`` has the owner of each storage in host memory, which is perhaps the snapshot, and
    loses the owners of storages that have been copied.
    """
    done = set()
    for tensor in layout.tensors:
        storage = tensor.untyped_storage()
        source, num_bytes = storage.data_ptr(), storage.nbytes()
        if source in done:
            continue
        done.add(source)
        target = snapshot_address + layout.offsets[source]
        owner = on_host.pop(source, None)
        if tensor.is_cuda and owner is None:
            # torch would copy across registrations, which CUDA refuses
            device.copy_out(target, source, num_bytes)
        elif source != target:
            start = target - target % mmap.PAGESIZE
            with contextlib.suppress(OSError):  # a kernel before 5.14
                libc.populate(start, target + num_bytes - start)
            host_bytes(target, num_bytes).copy_(host_bytes(source, num_bytes))
        del owner
    device.synchronize()


def relocate(layout: WeightLayout, address: int, device: Device) -> None:
    """Make every tensor a view of the address range at ``address``; free the old memory."""
    address_range = over(device, address, layout.num_bytes)
    for tensor in layout.tensors:
        storage = tensor.untyped_storage()
        start = layout.offsets[storage.data_ptr()]
        _view(tensor, address_range[start : start + storage.nbytes()])


def replace_storages(
    tensors: Iterable[torch.Tensor], place: Callable[[torch.UntypedStorage], torch.Tensor]
) -> list[torch.UntypedStorage]:
    """Give tensors other storages; return the storages that they had.

    ``place`` returns the bytes that take the place of a storage.
    """
    made: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in made:
            made[address] = storage, place(storage)
        _view(tensor, made[address][1])
    return [storage for storage, _ in made.values()]


def _view(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    typed = flat.view(tensor.dtype)
    offset = int(typed.storage_offset() + tensor.storage_offset())
    tensor.data = typed.as_strided(tensor.shape, tensor.stride(), offset)


def sharing(model: nn.Module, addresses: Collection[int]) -> list[torch.Tensor]:
    """Return all tensors of a model's modules whose storages are at ``addresses``.

    Buffers and plain attributes may be views of parameters, such as a mixer's ``conv_weights``.
    """
    return [one for one in tensors_of(model) if one.untyped_storage().data_ptr() in addresses]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return all tensors of a model's modules that have memory."""
    named = (*model.named_parameters(), *model.named_buffers(), *_leaves_of(model))
    return [
        one
        for _, one in named
        if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr()
    ]


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = list(model.named_parameters(remove_duplicate=True))
    buffers = on_weight_device(model, model.named_buffers(remove_duplicate=True))
    named = [*parameters, *buffers, *loose_tensors(model)]
    return [(base_name(name), tensor) for name, tensor in named]


def loose_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the modules' plain attributes that are on the weights' device.

    Post-processing may store results in plain attributes: the absorbed projections of latent
    attention, for example, or scales as floats. Tensors on the weights' device are part of the
    snapshot like weights. A snapshot cannot contain the rest, which :func:`loose_digest` covers.
    Wrappers for LoRA have no such state.
    """
    device = _weight_device(model)
    return [
        (name, leaf)
        for name, leaf in _leaves_of(model)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    ]


def on_weight_device(
    model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors on the weights' device: others stay where the model reads them.

    Without parameters, all tensors are taken for weights.
    """
    device = _weight_device(model)
    return [(name, tensor) for name, tensor in named if device is None or tensor.device == device]


def loose_digest(model: nn.Module) -> str:
    """Return a digest of the modules' state outside of a snapshot: fractions, and host tensors.

    Two loads of a model have the same digest if none of this state differs, which includes buffers
    that are not on the weights' device. Integers and texts are
    configuration.
    """
    device = _weight_device(model)
    digest = hashlib.sha256()
    buffers = model.named_buffers(remove_duplicate=True)
    elsewhere = [
        (base_name(n), tensor) for n, tensor in buffers if device and tensor.device != device
    ]
    for name, leaf in chain(_leaves_of(model), elsewhere):
        if isinstance(leaf, float):
            digest.update(f"{name}={leaf.hex()}\n".encode())
        elif leaf.device != device and leaf.device.type != "meta":
            data = leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            content = hashlib.sha256(data).hexdigest()
            digest.update(f"{name}={leaf.dtype} {tuple(leaf.shape)} {content}\n".encode())
    return digest.hexdigest()


def _weight_device(model: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in model.parameters()), None)


def _leaves_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yield the tensors and fractions in the modules' plain attributes, with names."""
    for full_name, module in model.named_modules():
        if is_wrapper(module):
            continue
        name = base_name(full_name)
        for attribute, value in sorted(vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for number, leaf in enumerate(_leaves(value)):
                    yield f"{name}.{attribute}.{number}", leaf


def _leaves(value: object) -> Iterator[torch.Tensor | float]:
    if isinstance(value, torch.Tensor | float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def base_name(name: str) -> str:
    """Return the name of a module or tensor in the same model without wrappers.

    A wrapper has the wrapped module as ``base_layer``, and slots as plain attributes, neither
    parameters nor buffers.
    """
    return ".".join(part for part in name.split(".") if part != _BASE_LAYER)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module wraps another module for LoRA."""
    return isinstance(module, BaseLayerWithLoRA)


def slot_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of all slots with names, in the order of the modules."""
    return [
        (f"{name}.{attribute}.{number}", tensor)
        for name, module in model.named_modules()
        if is_wrapper(module)
        for attribute, value in sorted(vars(module).items())
        if attribute not in ("_parameters", "_buffers", "_modules")
        for number, tensor in enumerate(_tensors(value))
    ]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
