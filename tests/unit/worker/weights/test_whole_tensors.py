"""Tensors of a checkpoint that are read in part refuse the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402

from gpupoold.worker.weights.whole_tensors import whole_tensors  # noqa: E402

Read = Callable[[Any, Any], object]


def row_by_row(target: Any, tensor: Any) -> None:
    for row, values in zip(target, tensor, strict=True):
        row.copy_(values)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any], Read], None]:
    """A function that loads tensors by vLLM's loader, of which ``read`` reads each."""

    def load_all(tensors: list[Any], read: Read) -> None:
        def get_all_weights(*_: object) -> Iterator[tuple[str, Any]]:
            yield from ((f"tensor-{index}", tensor) for index, tensor in enumerate(tensors))

        def load_weights(loader: Any, model: object, config: object) -> None:
            for _, tensor in DefaultModelLoader.get_all_weights(loader, config, model):
                read(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)

        monkeypatch.setattr(DefaultModelLoader, "get_all_weights", get_all_weights)
        monkeypatch.setattr(DefaultModelLoader, "load_weights", load_weights)
        with whole_tensors():
            unbound: Any = DefaultModelLoader.load_weights
            unbound(None, None, None)

    return load_all


@pytest.mark.parametrize(
    "read",
    [
        lambda target, tensor: target.copy_(tensor),
        lambda target, tensor: target.t().copy_(tensor.t()),
        lambda target, tensor: target.__setitem__(slice(None), tensor),
        row_by_row,
        lambda target, tensor: target.copy_(tensor * 2)[:1].copy_(tensor[:1] * 2),
        lambda target, tensor: None,
    ],
)
def test_tensors_that_are_read_whole_or_computed_with(loaded: Any, read: Read) -> None:
    loaded([torch.ones(4, 8), torch.ones(3)], read)


@pytest.mark.parametrize(
    "read",
    [
        lambda target, tensor: target[:2].copy_(tensor[:2]),
        lambda target, tensor: target[:, 4:].copy_(tensor.narrow(1, 4, 4)),
        lambda target, tensor: target.__setitem__(slice(0, 2), tensor[2:]),
    ],
)
def test_a_tensor_that_is_read_in_part(loaded: Any, read: Read) -> None:
    with pytest.raises(ValueError, match=r"tensor-0 of shape \[4, 8\] .* of which 16 have"):
        loaded([torch.ones(4, 8)], read)


def test_a_tensor_whose_memory_another_tensor_has_now(loaded: Any) -> None:
    memory = torch.ones(64)
    tensors = [memory[:32].view(4, 8), memory[8:16], memory[16:64]]
    loaded(tensors, lambda target, tensor: target.copy_(tensor))
    with pytest.raises(ValueError, match="tensor-0"):
        loaded(tensors, lambda target, tensor: target[:3].copy_(tensor[:3]))


def test_vllm_loads_as_before_afterwards() -> None:
    load = DefaultModelLoader.load_weights
    with contextlib.suppress(ZeroDivisionError), whole_tensors():
        assert DefaultModelLoader.load_weights is not load
        raise ZeroDivisionError
    assert DefaultModelLoader.load_weights is load
