"""Modules that vLLM wraps for LoRA, and their slots: tensors with the adapters in use.

A wrapper has the wrapped module as ``base_layer``, and slots as plain attributes, neither
parameters nor buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA

_BASE_LAYER = "base_layer"


def base_name(name: str) -> str:
    """Return the name of a module or tensor in the same model without wrappers."""
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
