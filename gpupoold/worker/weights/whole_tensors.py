"""Refusal of checkpoints whose tensors vLLM reads in part only.

vLLM's loaders take the part of a tensor that its rank needs. On one GPU that is the whole tensor,
unless ``config.json`` has another size: with half of the intermediate size a Llama loads without an
error, and answers nonsense.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from gpupoold.worker.weights.stages import replaced


@contextlib.contextmanager
def whole_tensors() -> Iterator[None]:
    """Refuse checkpoints that vLLM reads in part inside the context.

    Raises:
        ValueError: a tensor of the checkpoint was read in part, from vLLM's ``load_weights``.
    """
    get_all_weights, load = DefaultModelLoader.get_all_weights, DefaultModelLoader.load_weights

    def load_weights(loader: Any, model: nn.Module, config: ModelConfig) -> None:
        copies = _Copies()

        def noted(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in get_all_weights(*arguments):
                copies.note(name, tensor)
                yield name, tensor

        with copies, replaced(DefaultModelLoader, "get_all_weights", noted):
            load(loader, model, config)
        copies.check()

    with replaced(DefaultModelLoader, "load_weights", load_weights):
        yield


@dataclass
class _Tensor:
    """A tensor of a checkpoint in host memory, and how many of its elements were copied."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    num_copied: int = 0

    def check(self) -> None:
        """Raise a ``ValueError`` if a part was copied.

        Elements that vLLM computes with before it stores them are not counted, so a count of zero
        says nothing.
        """
        num_elements = math.prod(self.shape)
        if 0 < self.num_copied < num_elements:
            raise ValueError(
                f"{self.name} of shape {list(self.shape)} has {num_elements:,} elements, "
                f"of which {self.num_copied:,} have a place in the model"
            )


class _Copies(TorchFunctionMode):
    """A torch function mode that counts the elements copied from each tensor of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[_Tensor] = []  # by address

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Count copies from a tensor, and check tensors that were at its addresses before."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        first = bisect_right(self._tensors, start, key=lambda earlier: earlier.end)
        last = bisect_left(self._tensors, end, key=lambda earlier: earlier.start)
        for earlier in self._tensors[first:last]:
            earlier.check()
        self._tensors[first:last] = [_Tensor(name, tuple(tensor.shape), start, end)]

    def check(self) -> None:
        """Raise a ``ValueError`` if a part of a tensor was copied."""
        for tensor in self._tensors:
            tensor.check()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        source = args[-1] if func in _COPIES else None
        if isinstance(source, torch.Tensor) and source.device.type == "cpu" and source.nbytes:
            address = source.data_ptr()
            index = bisect_right(self._tensors, address, key=lambda tensor: tensor.start) - 1
            if index >= 0 and address < self._tensors[index].end:
                self._tensors[index].num_copied += source.numel()
        return func(*args, **(kwargs or {}))


_COPIES = (torch.Tensor.copy_, torch.Tensor.__setitem__)
