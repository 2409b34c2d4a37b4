"""Digests of a model's bytes on the device, which no move may change."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gpupoold.memory.device import Device
from gpupoold.memory.kv_extents import Place
from gpupoold.worker.engine.engine import ModelEngine
from gpupoold.worker.engine.vllm_process import whole_model
from gpupoold.worker.weights import tensors

if TYPE_CHECKING:
    from torch import nn

    from gpupoold.worker.turns.loop import TurnLoop

# Attributes in which vLLM's vision models hand embeddings to the forward pass of the same step.
_SCRATCH = ("per_layer_embeddings", "deepstack_input_embeds")


def checksum(loop: TurnLoop, model: str) -> dict[str, Any]:
    """Return SHA-256 digests of a model's weights and live KV blocks; makes the model resident."""
    engine = loop.engine(model)
    loop.interrupt_turn()
    loop.switch_to(model)
    loop.residency.bring_all(model)
    loop.residency.save_prefixes(model)
    engine.kv.finish_exports()  # blocks of ended requests live until they are copied
    return {
        "weights": _weights_digest(loop.own.device, engine),
        "kv": kv_digest(loop.own.device, engine),
        "num_live_blocks": len(_live_blocks(engine)),
    }


def kv_digest(device: Device, engine: ModelEngine) -> str:
    """Return the SHA-256 of the live KV blocks, all of which must be on the device."""
    digest = hashlib.sha256()
    buffer = tensors.over(device, engine.kv.address, engine.kv.geometry.total_bytes)
    for offset, num_bytes in engine.kv.geometry.extents(_live_blocks(engine)):
        digest.update(buffer[offset : offset + num_bytes].cpu().numpy().tobytes())
    return digest.hexdigest()


def scratch_spans(model: nn.Module) -> list[tuple[int, int]]:
    """Return address and bytes of each storage that steps write, in ascending order.

    The content means nothing between two steps.
    """
    written = [
        tensor.untyped_storage()
        for name, tensor in tensors.loose_tensors(model)
        if name.split(".")[-2] in _SCRATCH
    ]
    return sorted({(one.data_ptr(), one.nbytes()) for one in written if one.nbytes()})


def _weights_digest(device: Device, engine: ModelEngine) -> str:
    """Return the SHA-256 of a resident model's weights without the tensors that steps write."""
    first, end = engine.weights.address, engine.info.weight_bytes
    weights = tensors.over(device, first, end)
    digest, start = hashlib.sha256(), 0
    for address, num_bytes in (*scratch_spans(whole_model(engine.runner)), (first + end, 0)):
        digest.update(weights[start : address - first].cpu().numpy().tobytes())
        start = address - first + num_bytes
    return digest.hexdigest()


def _live_blocks(engine: ModelEngine) -> list[int]:
    """Return the blocks on the device with a reference, in ascending order."""
    return [b for c in engine.kv.index.extents(Place.DEVICE) for b in engine.kv.live_blocks(c)]
