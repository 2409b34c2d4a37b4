"""State of a model's modules besides parameters and buffers.

Post-processing may store results in plain attributes: the absorbed projections of latent attention,
for example, or scales as floats. Tensors on the weights' device are part of the snapshot like
weights. A snapshot cannot contain the rest, which :func:`loose_digest` covers. Wrappers for LoRA
have no such state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from gpupoold.worker.weights.wrappers import base_name, is_wrapper

# Attributes in which vLLM's vision models hand embeddings to the forward pass of the same step.
_SCRATCH = ("per_layer_embeddings", "deepstack_input_embeds")


def loose_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in the modules' plain attributes that are on the weights' device."""
    device = _weight_device(model)
    return [
        (name, leaf)
        for name, leaf in _leaves_of(model)
        if isinstance(leaf, torch.Tensor) and leaf.device == device
    ]


def scratch_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the loose tensors that steps write; their content means nothing between steps."""
    return [tensor for name, tensor in loose_tensors(model) if name.split(".")[-2] in _SCRATCH]


def on_weight_device(
    model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors on the weights' device: others stay where the model reads them.

    Without parameters, all tensors are taken for weights.
    """
    device = _weight_device(model)
    return [(name, one) for name, one in named if device is None or one.device == device]


def loose_digest(model: nn.Module) -> str:
    """Return a digest of the modules' state outside of a snapshot: fractions, and host tensors.

    Two loads of a model have the same digest if none of this state differs, which includes buffers
    that are not on the weights' device. Integers and texts are
    configuration.
    """
    device = _weight_device(model)
    digest = hashlib.sha256()
    buffers = model.named_buffers(remove_duplicate=True)
    elsewhere = [(base_name(n), one) for n, one in buffers if device and one.device != device]
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
