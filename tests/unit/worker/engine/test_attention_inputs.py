"""The shapes that attention layers get are checked at the first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from gpupoold.errors import Refused
from gpupoold.worker.engine.cpu_build import check_first_inputs


class Layer(Attention):
    """An attention layer of 4 heads with 2 heads of KV, without a cache."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.num_kv_heads = 4, 2
        self.head_size = self.head_size_v = 8

    def forward(self, query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return query


def tokens(num_heads: int) -> torch.Tensor:
    return torch.zeros(3, 8 * num_heads)


def test_fitting_inputs_reach_the_layer_unchanged() -> None:
    layer = Layer()
    check_first_inputs("m", {"layers.0.attn": layer})
    for _ in range(2):
        assert layer(tokens(4), tokens(2), tokens(2)).shape == (3, 32)
    assert "forward" not in vars(layer)  # later calls are the layer's own


def test_heads_in_a_dimension_of_their_own_fit() -> None:
    layer = Layer()
    check_first_inputs("m", {"layers.0.attn": layer})
    key = tokens(2).view(3, 2, 8)
    assert layer.forward(query=tokens(4), key=key, value=key) is not None


def test_a_layer_that_shares_the_kv_of_another_gets_no_keys() -> None:
    layer = Layer()
    check_first_inputs("m", {"layers.0.attn": layer})
    assert layer(tokens(4), None, None) is not None


@pytest.mark.parametrize(
    ("heads", "named"), [((8, 2, 2), "queries"), ((4, 4, 2), "keys"), ((4, 2, 1), "values")]
)
def test_other_heads_than_configured_are_refused(heads: tuple[int, ...], named: str) -> None:
    layer = Layer()
    check_first_inputs("m", {"layers.0.attn": layer})
    with pytest.raises(Refused, match=rf"^m: layers\.0\.attn gets {named} of \d+ numbers"):
        layer(*map(tokens, heads))
