"""A model with slots for adapters has the layout of the model without, and the slots apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.lora.layers import BaseLayerWithLoRA

from gpupoold.worker.weights.tensors import base_name, plan_layout, plan_slots


class Wrapper(BaseLayerWithLoRA):  # type: ignore[misc, unused-ignore]
    """A wrapper as vLLM makes for a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8))
        self.lora_b_stacked = torch.zeros(2, 1, 16, 4)
        self.flat = self.lora_b_stacked.view(-1, 4)
        self.punica_wrapper = object()


def plain() -> nn.Sequential:
    first: Any = nn.Linear(8, 16)
    first.scale = 0.5
    return nn.Sequential(first, nn.LayerNorm(16))


def wrapped() -> nn.Sequential:
    made = plain()
    made[0] = Wrapper(made[0])
    return made


def test_names_without_wrappers() -> None:
    assert base_name("model.q_proj.base_layer.weight") == "model.q_proj.weight"
    assert base_name("base_layer_norm.weight") == "base_layer_norm.weight"


def test_the_layout_is_that_of_the_plain_model() -> None:
    assert plan_layout(wrapped()).digest == plan_layout(plain()).digest
    assert plan_layout(wrapped()).num_bytes == plan_layout(plain()).num_bytes
    other: Any = wrapped()
    other[0].base_layer.scale = 0.25
    assert plan_layout(other).digest != plan_layout(plain()).digest


def test_all_slots_are_laid_out_and_views_share_their_bytes() -> None:
    slots = plan_slots(wrapped())
    assert len(slots.tensors) == 4
    assert len(slots.offsets) == 3
    assert slots.num_bytes == 2 * 256 + 512
    assert plan_slots(plain()).num_bytes == 0
