"""What a model keeps outside of parameters and buffers is in the snapshot, or in a digest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.in_worker.digests import scratch_spans
from gpupoold.worker.weights.tensors import (
    loose_digest,
    loose_tensors,
    on_weight_device,
    plan_layout,
)


class Layer(nn.Module):
    """A layer as post-processing may leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(2))
        self.folded = torch.arange(4.0)
        self.view = self.weight.data[1:]
        self.up = torch.ones(2)
        self.parts = {"up": [self.up], "size": 7}
        self.elsewhere = torch.empty(2, device="meta")
        self.k_scale = 0.5
        self.size = 3
        self.name = "layer"


def changed(layer: Layer) -> str:
    return loose_digest(nn.Sequential(nn.Linear(2, 2), layer))


def weight(layer: Layer) -> None:
    layer.weight.data.fill_(3.0)


def buffer(layer: Layer) -> None:
    layer.get_buffer("scale").fill_(3.0)


def tensor(layer: Layer) -> None:
    layer.folded[1] = -1.0


def inner_tensor(layer: Layer) -> None:
    layer.parts["up"] = [torch.zeros(2)]


def configuration(layer: Layer) -> None:
    layer.size, layer.name = 4, "another"


@pytest.mark.parametrize("change", [weight, buffer, tensor, inner_tensor, configuration])
def test_what_a_snapshot_has_does_not_count(change: Callable[[Layer], None]) -> None:
    layer = Layer()
    change(layer)
    assert changed(layer) == changed(Layer())


def number(layer: Layer) -> None:
    layer.k_scale = 0.25


def another(layer: Layer) -> None:
    setattr(layer, "v_scale", 1.0)  # noqa: B010


@pytest.mark.parametrize("change", [number, another])
def test_what_it_has_not_does(change: Callable[[Layer], None]) -> None:
    layer = Layer()
    change(layer)
    assert changed(layer) != changed(Layer())


def test_tensors_in_attributes_are_laid_out_once() -> None:
    layer = Layer()
    assert [name for name, _ in loose_tensors(layer)] == [
        ".folded.0",
        ".parts.0",
        ".up.0",
        ".view.0",
    ]
    layout = plan_layout(layer)
    assert {id(one) for one in layout.tensors} >= {id(layer.folded), id(layer.up)}
    storages = {one.untyped_storage().data_ptr() for one in layout.tensors}
    assert layout.offsets.keys() == storages, "a view has its parameter's place"
    assert len(storages) == 4


def test_another_shape_is_another_layout() -> None:
    layer = Layer()
    layer.folded = layer.folded.reshape(2, 2)
    assert plan_layout(layer).digest != plan_layout(Layer()).digest


def test_tensors_that_steps_write_are_known() -> None:
    layer = Layer()
    assert scratch_spans(layer) == []
    written = [torch.zeros(4), torch.zeros(8)]
    setattr(layer, "deepstack_input_embeds", written)  # noqa: B010
    assert scratch_spans(layer) == sorted((one.data_ptr(), one.nbytes) for one in written)


def test_buffers_elsewhere_stay_where_they_are() -> None:
    """Such as tables that a model on a GPU reads on the host; here on no device at all."""
    layer = Layer()
    before = plan_layout(layer)
    layer.register_buffer("table", torch.empty(3, device="meta"))
    assert plan_layout(layer).num_bytes == before.num_bytes
    assert [name for name, _ in on_weight_device(layer, layer.named_buffers())] == ["scale"]
