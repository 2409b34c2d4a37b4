"""The order in which a step needs a model's weights.

Weights outside of the decoder layers come first, then the layers, then the head that makes tokens,
unless the head shares its weights with the embedding. The order of the layers is a guess from
their numbers, which an engine checks before a step begins without all weights
(:mod:`gpupoold.worker.turns.early_start`).
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from gpupoold.worker.weights.loose import loose_tensors
from gpupoold.worker.weights.wrappers import base_name

_FIRST = -1


class DecoderLayers(NamedTuple):
    """The decoder layers: the module list with the most bytes."""

    prefix: str
    num_layers: int

    @classmethod
    def of(cls, model: nn.Module) -> DecoderLayers:
        """Find the decoder layers of a model; of lists of equal size, the outermost."""
        largest, most_bytes = NO_LAYERS, 0
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList) or not name or len(module) < 2:
                continue
            num_bytes = sum(parameter.nbytes for parameter in module.parameters())
            if num_bytes > most_bytes:
                largest, most_bytes = cls(f"{base_name(name)}.", len(module)), num_bytes
        return largest

    def index_of(self, name: str) -> int | None:
        """Return the layer to which a module or tensor belongs, None if to no layer."""
        if not self.num_layers or not name.startswith(self.prefix):
            return None
        return int(name.removeprefix(self.prefix).partition(".")[0])


NO_LAYERS = DecoderLayers("", 0)


class NeedOrder:
    """The rank of each storage of a model: -1, the first layer that uses the storage, or last."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = DecoderLayers.of(model)
        self._heads = {
            base_name(name)
            for name, module in model.named_modules()
            if isinstance(module, ParallelLMHead)
        }
        self._ranks: dict[int, int] = {}
        parameters = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        for name, tensor in chain(parameters, buffers, loose_tensors(model)):
            address = tensor.untyped_storage().data_ptr()
            rank = self._rank_of_name(base_name(name))
            self._ranks[address] = min(rank, self._ranks.get(address, rank))

    def rank(self, tensor: torch.Tensor) -> int:
        """Return the rank of a tensor's storage; unknown storages come first."""
        return self._ranks.get(tensor.untyped_storage().data_ptr(), _FIRST)

    def _rank_of_name(self, name: str) -> int:
        if (layer := self.layers.index_of(name)) is not None:
            return layer
        is_of_head = name.rpartition(".")[0] in self._heads
        return self.layers.num_layers if is_of_head else _FIRST
