"""A model on a simulated device: the headers of its files, and a latency model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint, check_config, is_pooling
from gpupoold.checkpoints.survey import (
    MODEL_DTYPE_BITS,
    estimate_weight_bytes,
    why_checkpoint_undivided,
)
from gpupoold.errors import Refused
from gpupoold.latency.models import Fit, FitQuality, LatencyModel, Profile, StoredFit
from gpupoold.latency.profiles import latency_for
from gpupoold.latency.shape import LatencyError, ModelShape, from_hf_config
from gpupoold.sim.boxes import SimModel
from gpupoold.units import format_bytes
from gpupoold.wire.messages import LoadedModel, ModelToLoad

BLOCK_TOKENS = 16

_DEFAULT_MAX_LEN = 2048
# The device takes exactly the time of the latency model, so the fit has no error.
_EXACT = FitQuality(r_squared=1.0, mean_relative_error=0.0, p90_relative_error=0.0, num_points=0)

# Ids of common word pieces in all usual vocabularies: after control tokens and single bytes,
# before rare tokens.
_FIRST, _END = 1300, 2000
_STRIDE = 37


class Vocabulary(NamedTuple):
    """Token ids from ``first`` to before ``end``, without special tokens."""

    first: int
    end: int

    @classmethod
    def of_size(cls, vocab_size: int) -> Self:
        """Return the vocabulary of a model with ``vocab_size`` ids (0: unknown)."""
        if vocab_size >= _END or vocab_size <= 0:
            return cls(_FIRST, _END)
        return cls(vocab_size // 2, max(vocab_size // 2 + 1, vocab_size * 3 // 4))

    def token_ids(self, seed: int, start: int, count: int) -> list[int]:
        """Return ``count`` tokens of an answer from token ``start`` (from 0), fixed by ``seed``."""
        size = self.end - self.first
        return [self.first + (seed + i * _STRIDE) % size for i in range(start, start + count)]


def seed_of(request_id: str) -> int:
    """Return a seed for a request: the same in every process, unlike ``hash``."""
    return zlib.crc32(request_id.encode())


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on a simulated device."""

    sim: SimModel
    loaded: LoadedModel
    vocabulary: Vocabulary
    layout_digest: str

    def profile(self) -> Profile:
        """Return the latency model as a measured profile, which takes no time."""
        latency = self.sim.latency
        return Profile(
            prefill=StoredFit.of(Fit(latency.prefill, _EXACT)),
            decode=StoredFit.of(Fit(latency.decode, _EXACT)),
            duration_s=0.0,
        )


def know(model: ModelToLoad, gpu: str, device_bytes: int, num_gpus: int = 1) -> KnownModel:
    """Read the checkpoint of ``model`` for a device of ``num_gpus`` GPUs, without weights.

    Raises Refused if the checkpoint cannot be served, does not fit on the device, cannot be divided
    among the GPUs, or its latency is unknown.
    """
    path = Path(model.path)
    info = check_checkpoint(path, allow_pickle=True, allow_remote_code=model.allow_remote_code)
    config = check_config(path, allow_remote_code=model.allow_remote_code)
    if is_pooling(path, info.architecture) or model.engine.get("runner") == "pooling":
        raise Refused(
            f"{model.name}: {info.architecture} makes embeddings, scores or classes, and a "
            "simulated device makes tokens only",
            "add the model on an emulated device or a GPU",
        )
    dtype = _dtype(info, model.dtype)
    if problem := why_checkpoint_undivided(config, num_gpus):
        raise Refused(f"{model.name}: {num_gpus} GPUs cannot divide the model: {problem}")
    shape, latency = _latency(model.name, config, info, dtype, gpu, num_gpus)
    weight_bytes = estimate_weight_bytes(info, model.dtype)
    kv_bytes = shape.kv_bytes_on(num_gpus)
    num_blocks = (device_bytes - weight_bytes) // (kv_bytes * BLOCK_TOKENS)
    loaded = LoadedModel(
        name=model.name,
        architecture=info.architecture,
        max_model_len=_max_len(model, info, num_blocks * BLOCK_TOKENS, device_bytes),
        dtype=dtype,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=num_blocks,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv_bytes,
        supported_tasks=("generate",),
    )
    sim = SimModel(model.name, model.targets, latency, weight_bytes, kv_bytes)
    vocab_size = int((config.get("text_config") or config).get("vocab_size") or 0)
    return KnownModel(sim, loaded, Vocabulary.of_size(vocab_size), f"{weight_bytes}/{num_gpus}")


def _latency(
    name: str, config: dict[str, Any], info: CheckpointInfo, dtype: str, gpu: str, num_gpus: int
) -> tuple[ModelShape, LatencyModel]:
    try:
        shape = from_hf_config(config, info.num_parameters, dtype)
        return shape, latency_for(gpu, shape, num_gpus=num_gpus)
    except LatencyError as error:
        raise Refused(f"{name}: the latency on {gpu} is unknown: {error}") from error


def _dtype(info: CheckpointInfo, wanted: str) -> str:
    """Return the dtype an engine would choose: 32-bit checkpoints are served in 16 bits."""
    if wanted != "auto":
        return wanted
    return info.dtype if MODEL_DTYPE_BITS.get(info.dtype) == 16 else "bfloat16"


def _max_len(model: ModelToLoad, info: CheckpointInfo, room: int, device_bytes: int) -> int:
    """Return the tokens of the longest request: the configured number, or as many as fit.

    Raises Refused if ``room`` (the KV beside the weights, in tokens) is too small.
    """
    longest = info.max_position_embeddings or _DEFAULT_MAX_LEN
    if room < (model.max_model_len or 1):
        raise Refused(
            f"{model.name}: beside the weights a device of {format_bytes(device_bytes)} can hold "
            f"the KV of {max(room, 0)} tokens, not of {model.max_model_len or 1}",
            "lower --max-len, or use devices with more memory",
        )
    return model.max_model_len or min(longest, room)
