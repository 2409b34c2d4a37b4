"""Digests of a model's bytes on the device, to check that moves change no byte."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gpupoold.memory.contracts import Device
from gpupoold.memory.kv_extents import Place
from gpupoold.worker.weights import tensors

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine


def weights_digest(device: Device, engine: ModelEngine) -> str:
    """Return the SHA-256 of a resident model's weights without the tensors that steps write."""
    weights = tensors.over(device, engine.weights.address, engine.info.weight_bytes)
    digest, start = hashlib.sha256(), 0
    for offset, num_bytes in (*engine.scratch, (engine.info.weight_bytes, 0)):
        digest.update(weights[start:offset].cpu().numpy().tobytes())
        start = offset + num_bytes
    return digest.hexdigest()


def live_blocks(engine: ModelEngine) -> list[int]:
    """Return the blocks on the device with a reference, in ascending order."""
    return [b for c in engine.kv.extents(Place.DEVICE) for b in engine.kv.live_blocks(c)]


def kv_digest(device: Device, engine: ModelEngine) -> str:
    """Return the SHA-256 of the live KV blocks, all of which must be on the device."""
    digest = hashlib.sha256()
    buffer = tensors.over(device, engine.kv.address, engine.kv.geometry.total_bytes)
    for offset, num_bytes in engine.kv.geometry.extents(live_blocks(engine)):
        digest.update(buffer[offset : offset + num_bytes].cpu().numpy().tobytes())
    return digest.hexdigest()
