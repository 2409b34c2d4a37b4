"""Threads that read a checkpoint ahead of the thread that loads the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from gpupoold.worker.weights.loading import read_ahead  # noqa: E402

NAMES = [f"weight-{number}" for number in range(6)]
TENSOR_BYTES = 18 << 20  # more than a thread reads at a time
AHEAD_BYTES = 2 * TENSOR_BYTES


def test_tensors_come_in_order_and_few_are_read_ahead(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(
        {name: torch.full((TENSOR_BYTES // 4,), float(at)) for at, name in enumerate(NAMES)}, file
    )
    taken = []

    def tensors() -> Iterator[tuple[str, Any]]:
        with safe_open(file, "pt") as opened:
            for name in NAMES:
                taken.append(name)
                yield name, opened.get_tensor(name)

    for at, (name, tensor) in enumerate(read_ahead(tensors(), AHEAD_BYTES)):
        assert (name, int(tensor[0]), int(tensor[-1])) == (NAMES[at], at, at)
        assert len(taken) <= at + 1 + AHEAD_BYTES // TENSOR_BYTES


def test_an_error_of_the_checkpoint_is_raised_and_empty_tensors_pass() -> None:
    def tensors() -> Iterator[tuple[str, Any]]:
        yield "empty", torch.empty(0)
        yield "meta", torch.empty(8, device="meta")
        raise ValueError("broken")

    found = read_ahead(tensors(), num_bytes=0)
    assert [next(found)[0], next(found)[0]] == ["empty", "meta"]
    with pytest.raises(ValueError, match="broken"):
        next(found)
