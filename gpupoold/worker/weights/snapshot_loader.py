"""A vLLM load format for models with a snapshot, which reads no checkpoint.

vLLM builds the model and post-processes zeros; then the snapshot replaces the result. The result is
right if parameters and buffers contain everything that depends on the weights: :func:`loose_digest`
detects other differences, and the self-check the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from gpupoold.worker.weights.wrappers import base_name, is_wrapper

LOAD_FORMAT = "gpupool-snapshot"


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
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                tensor.zero_()


def loose_digest(model: nn.Module) -> str:
    """Return a digest of a loaded model's state besides parameters and buffers.

    Post-processing may store results in other tensors or numbers, which no snapshot contains. Two
    loads have the same digest if none of this state differs. Wrappers for LoRA have no such state.
    """
    digest = hashlib.sha256()
    for full_name, module in model.named_modules():
        if is_wrapper(module):
            continue
        name = base_name(full_name)
        for attribute, value in sorted(vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for number, leaf in enumerate(_leaves(value)):
                    digest.update(f"{name}.{attribute}.{number}={leaf}\n".encode())
    return digest.hexdigest()


def _leaves(value: object) -> Iterator[str]:
    """Yield the tensors and fractions in a value; integers and texts are configuration."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, float):
        yield value.hex()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
