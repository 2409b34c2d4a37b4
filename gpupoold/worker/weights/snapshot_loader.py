"""A vLLM load format for models with a snapshot, which reads no checkpoint.

vLLM builds the model and post-processes zeros; then the snapshot replaces the result. The result is
right if parameters, buffers and loose tensors contain everything that depends on the weights:
:func:`gpupoold.worker.weights.relocation.loose_digest` detects other differences, and the
self-check the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import supports_any_eagle
from vllm.model_executor.models.utils import process_eagle_weight

from gpupoold.checkpoints.tensor_file import TensorEntry, read_tensors

LOAD_FORMAT = "gpupool-snapshot"

# Scales of quantized KV. vLLM also stores the scales as floats, which no snapshot contains. Without
# scales in the checkpoint, the initial values remain.
_KV_SCALES = frozenset(f"{prefix}{name}_scale" for prefix in ("", "_") for name in "qkv") | {
    "prob_scale"
}

# vLLM's Transformers backend, and the tensors that have no parameter there before they are loaded.
_BACKEND = "vllm.model_executor.models.transformers"
_LATE = "lm_head.bias"


def register() -> None:
    """Make the load format known to vLLM in this process."""
    register_model_loader(LOAD_FORMAT)(_SnapshotLoader)


class _SnapshotLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the snapshot replaces the checkpoint."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill all weights with zeros, so that post-processing meets no accidental infinities."""
        folder = Path(model_config.model)
        if type(model).__module__.startswith(_BACKEND):
            loads: Any = model  # as every model of vLLM does
            late = [one for one in _stored(folder) if one.name.endswith(_LATE)]
            loads.load_weights((one.name, torch.zeros(one.shape)) for one in late)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name.rpartition(".")[2] not in _KV_SCALES:
                    tensor.zero_()
        if model_config.runner == "draft" and supports_any_eagle(model):
            for stored in _stored(folder):
                # An internal function of vLLM, which records whether a drafter has own embeddings.
                process_eagle_weight(model, stored.name)


def _stored(folder: Path) -> Iterator[TensorEntry]:
    """Yield a checkpoint's tensors, from the headers of the weight files."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_tensors(file)
