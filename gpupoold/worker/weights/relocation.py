"""The layout of a model's weights in its address range, and the move of the weights there.

vLLM loads and post-processes a model in ordinary torch memory. The resulting storages are the
snapshot; parameters, buffers and other tensors of the modules then become views of the address
range with the same shapes and strides. Slots of adapters are no part of the snapshot: they follow
in the address range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from gpupoold.memory.contracts import Device
from gpupoold.worker.weights import tensors
from gpupoold.worker.weights.loose import (
    loose_digest,
    loose_tensors,
    on_weight_device,
    scratch_tensors,
)
from gpupoold.worker.weights.order import NO_LAYERS, DecoderLayers, NeedOrder
from gpupoold.worker.weights.wrappers import base_name, slot_tensors

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The tensors of a model, and the offset of each tensor's storage in the address range.

    ``scratch`` has offset and bytes of each storage that steps write, in ascending order.
    ``layer_ends`` has, for each of the decoder ``layers``, the bytes from the start on that contain
    this layer, all layers before and everything that steps need before the layers.
    """

    tensors: tuple[torch.Tensor, ...]
    offsets: dict[int, int]  # address of a storage → offset in the address range
    num_bytes: int
    digest: str
    scratch: tuple[tuple[int, int], ...] = ()
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
    written = [tensor.untyped_storage() for tensor in scratch_tensors(model)]
    scratch = {(layout.offsets[one.data_ptr()], one.nbytes()) for one in written if one.nbytes()}
    return replace(
        layout,
        scratch=tuple(sorted(scratch)),
        layers=order.layers,
        layer_ends=_layer_ends(layout, order),
    )


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


def copy_out(layout: WeightLayout, snapshot_address: int, device: Device) -> None:
    """Write the snapshot: each storage at its offset in host memory pinned by ``device``."""
    done: set[int] = set()
    for tensor in layout.tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in done:
            continue
        done.add(storage.data_ptr())
        address = snapshot_address + layout.offsets[storage.data_ptr()]
        if tensor.is_cuda:  # torch would copy across two registrations, which CUDA refuses
            device.copy_out(address, storage.data_ptr(), storage.nbytes())
        else:
            source = torch.empty(0, dtype=torch.int8).set_(storage)
            tensors.host_bytes(address, storage.nbytes()).copy_(source)
    device.synchronize()


def relocate(layout: WeightLayout, address: int, device: Device) -> None:
    """Make every tensor a view of the address range at ``address``; free the old memory."""
    address_range = tensors.over(device, address, layout.num_bytes)
    for tensor in layout.tensors:
        storage = tensor.untyped_storage()
        start = layout.offsets[storage.data_ptr()]
        flat = address_range[start : start + storage.nbytes()].view(tensor.dtype)
        tensor.data = flat.as_strided(tensor.shape, tensor.stride(), _at(flat, tensor))


def _at(flat: torch.Tensor, tensor: torch.Tensor) -> int:
    return int(flat.storage_offset() + tensor.storage_offset())


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = list(model.named_parameters(remove_duplicate=True))
    buffers = on_weight_device(model, model.named_buffers(remove_duplicate=True))
    named = [*parameters, *buffers, *loose_tensors(model)]
    return [(base_name(name), tensor) for name, tensor in named]
