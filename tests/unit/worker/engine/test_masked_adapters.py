"""Tokens of the base model stay the same beside tokens of adapters, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.lora.layers import LoRAMapping

from gpupoold.worker.engine.cpu_build import MaskedAdapters

WIDTH, RANK, NUM_SLOTS = 6, 2, 3


@pytest.fixture
def wrapper() -> MaskedAdapters:
    made: Any = MaskedAdapters(16, 8, "cpu")
    mapping = LoRAMapping((7, 0, 9, 0), (7, 0, 9, 0), is_prefill=True)
    made.update_metadata(mapping, [9, 7, None], NUM_SLOTS + 1, 32)
    wrapper: MaskedAdapters = made
    return wrapper


def slots(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_SLOTS, 1, *shape, generator=generator)


def test_linear_layers(wrapper: MaskedAdapters) -> None:
    a, b, x = slots(RANK, WIDTH), slots(WIDTH, RANK), torch.ones(4, WIDTH)
    y = torch.zeros(4, WIDTH)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (WIDTH,))
    assert torch.equal(y[1], torch.zeros(WIDTH))
    assert torch.equal(y[3], torch.zeros(WIDTH))
    for token, slot in ((0, 1), (2, 0)):
        torch.testing.assert_close(y[token], b[slot, 0] @ (a[slot, 0] @ x[token]))


def test_logits(wrapper: MaskedAdapters) -> None:
    a, b, x = slots(RANK, WIDTH), slots(5, RANK), torch.ones(4, WIDTH)
    y = torch.zeros(4, 5)
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    assert torch.equal(y[1], torch.zeros(5))
    torch.testing.assert_close(y[2], b[0, 0] @ (a[0, 0] @ x[2]))
    assert torch.equal(x, torch.ones(4, WIDTH))


def test_embeddings(wrapper: MaskedAdapters) -> None:
    b, x = slots(WIDTH, RANK), torch.ones(4, RANK)
    y = torch.zeros(4, WIDTH)
    wrapper.add_lora_embedding(y, x, b)
    assert torch.equal(y[3], torch.zeros(WIDTH))
    torch.testing.assert_close(y[0], b[1, 0].sum(dim=1))
