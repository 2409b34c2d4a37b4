"""A vLLM load format for models whose weights are already in a snapshot: it reads no checkpoint.

vLLM builds the model and post-processes zeros; then the snapshot takes the place of whatever
came out. That is right as long as all that the weights decide lies in parameters and
buffers: :func:`loose_digest` tells whether anything else differs, a self-check the rest.
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

LOAD_FORMAT = "gpupool-snapshot"


def register() -> None:
    """Make the load format known to vLLM in this process."""
    register_model_loader(LOAD_FORMAT)(_SnapshotLoader)


class _SnapshotLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is read."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Zeros, so that post-processing meets no accidental infinities."""
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                tensor.zero_()


def loose_digest(model: nn.Module) -> str:
    """A digest of what a loaded model keeps besides parameters and buffers.

    Post-processing may put what it works out of the weights into other tensors or into
    numbers, where no snapshot has it. Two loads agree here if nothing of it differs.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        for attribute, value in sorted(vars(module).items()):
            if attribute not in ("_parameters", "_buffers", "_modules"):
                for number, leaf in enumerate(_leaves(value)):
                    digest.update(f"{name}.{attribute}.{number}={leaf}\n".encode())
    return digest.hexdigest()


def _leaves(value: object) -> Iterator[str]:
    """What a value has of tensors and fractions; integers and texts are configuration."""
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
