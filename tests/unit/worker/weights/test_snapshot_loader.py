"""What a model keeps outside of parameters and buffers shows in a digest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpupoold.worker.weights.snapshot_loader import loose_digest


class Layer(nn.Module):
    """A layer as post-processing may leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(2))
        self.folded = torch.arange(4.0)
        self.parts = {"up": [torch.ones(2)], "size": 7}
        self.k_scale = 0.5
        self.size = 3
        self.name = "layer"


def changed(layer: Layer) -> str:
    return loose_digest(nn.Sequential(nn.Linear(2, 2), layer))


def weight(layer: Layer) -> None:
    layer.weight.data.fill_(3.0)


def buffer(layer: Layer) -> None:
    layer.get_buffer("scale").fill_(3.0)


def configuration(layer: Layer) -> None:
    layer.size, layer.name = 4, "another"


@pytest.mark.parametrize("change", [weight, buffer, configuration])
def test_what_an_snapshot_has_does_not_count(change: Callable[[Layer], None]) -> None:
    layer = Layer()
    change(layer)
    assert changed(layer) == changed(Layer())


def tensor(layer: Layer) -> None:
    layer.folded[1] = -1.0


def shape(layer: Layer) -> None:
    layer.folded = layer.folded.reshape(2, 2)


def inner_tensor(layer: Layer) -> None:
    layer.parts["up"] = [torch.zeros(2)]


def number(layer: Layer) -> None:
    layer.k_scale = 0.25


def another(layer: Layer) -> None:
    layer.more = torch.tensor(1.0)


@pytest.mark.parametrize("change", [tensor, shape, inner_tensor, number, another])
def test_what_it_has_not_does(change: Callable[[Layer], None]) -> None:
    layer = Layer()
    change(layer)
    assert changed(layer) != changed(Layer())
