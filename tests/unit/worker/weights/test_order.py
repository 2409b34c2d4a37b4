"""The order of weights in the address range, and where each decoder layer ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

import torch
from hypothesis import given, strategies as st
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from gpupoold.worker.weights.tensors import NO_LAYERS, DecoderLayers, WeightLayout, plan_layout

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=3)


class Model(nn.Module):
    """Modules in any order; ``shared`` layers have the tensor of the first of them."""

    def __init__(
        self, layers: list[list[int]], before: list[int], after: list[int], *, tied: bool = False
    ) -> None:
        super().__init__()
        if before:
            self.embedding = module(before)
        self.layers = nn.ModuleList(module(sizes) for sizes in layers)
        self.norm = module(after)
        self.head = head(50)
        if tied and before:
            self.head.weight = next(self.embedding.parameters())


def module(sizes: list[int]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.zeros(size), requires_grad=False) for size in sizes)


def head(size: int) -> ParallelLMHead:
    """A head without vLLM's process groups."""
    made = ParallelLMHead.__new__(ParallelLMHead)
    nn.Module.__init__(made)
    made.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
    return made


class Extent(NamedTuple):
    start: int
    end: int


def extent(layout: WeightLayout, tensor: torch.Tensor) -> Extent:
    storage = tensor.untyped_storage()
    start = layout.offsets[storage.data_ptr()]
    return Extent(start, start + storage.nbytes())


@given(
    layers=st.lists(SIZES, min_size=2, max_size=5),
    before=SIZES,
    after=SIZES,
    tied=st.booleans(),
    sharing=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=3),
)
def test_what_a_layer_uses_is_before_its_end(
    layers: list[list[int]],
    before: list[int],
    after: list[int],
    tied: bool,
    sharing: list[tuple[int, int]],
) -> None:
    model = Model(layers, before, after, tied=tied)
    for one, other in sharing:
        lists: list[Any] = [model.layers[index % len(layers)] for index in (one, other)]
        lists[0].append(next(iter(lists[1].parameters())))
    layout = plan_layout(model)
    assert layout.layers == DecoderLayers("layers.", len(layers))
    assert len(layout.layer_ends) == len(layers)
    assert list(layout.layer_ends) == sorted(layout.layer_ends)
    outside = [*model.embedding.parameters(), *model.norm.parameters()]
    assert all(extent(layout, one).end <= layout.layer_ends[0] for one in outside)
    for layer, end in zip(model.layers, layout.layer_ends, strict=True):
        assert all(extent(layout, one).end <= end for one in layer.parameters())
    assert (extent(layout, model.head.weight).start < layout.layer_ends[0]) == tied
    # Every byte belongs to one storage.
    extents = sorted(Extent(*extent(layout, one)) for one in layout.tensors)
    assert all(one.end <= other.start for one, other in pairwise(extents))
    assert extents[-1].end <= layout.num_bytes


def test_a_later_layer_is_behind_the_end_of_an_earlier_one() -> None:
    model = Model([[300], [300], [300]], [64], [64])
    layout = plan_layout(model)
    starts = [extent(layout, next(layer.parameters())).start for layer in model.layers]
    assert all(start >= end for start, end in zip(starts[1:], layout.layer_ends, strict=False))
    assert extent(layout, model.head.weight).start >= layout.layer_ends[-1]


def test_the_decoder_is_the_largest_list() -> None:
    model = nn.Module()
    model.vision = nn.ModuleList([module([10]), module([10]), module([10])])
    model.text = nn.Module()
    model.text.layers = nn.ModuleList([module([500]), module([500])])
    model.text.layers[0].experts = nn.ModuleList([module([9]), module([9])])
    layers = DecoderLayers.of(model)
    assert layers == DecoderLayers("text.layers.", 2)
    assert layers.index_of("text.layers.1.attention") == 1
    assert layers.index_of("text.layers.10.weight") == 10
    assert layers.index_of("vision.1.weight") is None
    assert layers.index_of("text.norm") is None


def test_a_model_without_a_list_of_layers_has_no_order() -> None:
    plain = nn.Linear(3, 3)
    assert DecoderLayers.of(plain) == NO_LAYERS
    assert NO_LAYERS.index_of("weight") is None
    assert plan_layout(plain).layer_ends == ()
    single = nn.ModuleList([nn.Linear(3, 3)])
    assert DecoderLayers.of(single) == NO_LAYERS
