"""Threads that read ahead, and parameters that are views of a snapshot before the read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from gpupoold.memory.host import HostBuffer  # noqa: E402
from gpupoold.memory.libc import is_untouched  # noqa: E402
from gpupoold.worker.weights.reading import at_host, is_plain, may_be_in_place, read_ahead  # noqa: E402
from gpupoold.worker.weights.tensors import replace_storages, sharing  # noqa: E402

NUM = 4 << 20
NAMES = [f"weight-{number}" for number in range(6)]
TENSOR_BYTES = 18 << 20  # more than a thread reads at a time
AHEAD_BYTES = 2 * TENSOR_BYTES


def test_memory_is_untouched_until_a_write() -> None:
    memory = mmap.mmap(-1, NUM, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert is_untouched(address, NUM)
    memory[NUM // 2] = 1
    assert not is_untouched(address, NUM)


def test_memory_without_a_whole_page_may_have_been_used() -> None:
    tensor = torch.zeros(16)
    assert not is_untouched(tensor.data_ptr(), tensor.nbytes)


def test_values_that_are_there_before_the_read_are_kept() -> None:
    model: Any = nn.Linear(512, 1024)
    model.tied = nn.Parameter(model.weight.data.t())
    expected, bias = model.weight.detach().clone(), model.bias.detach().clone()
    snapshot = HostBuffer.create("snapshot", NUM)
    used = 0

    def place(storage: Any) -> Any:
        nonlocal used
        address, used = snapshot.address + used, used + -(-storage.nbytes() // 256) * 256
        return at_host(address, storage)

    model.register_buffer("rows", model.weight.data.view(2, 512, 512))  # as in a Mamba mixer
    model.plain = [model.bias.data[:8]]
    shared = sharing(model, {one.untyped_storage().data_ptr() for one in model.parameters()})
    assert len(shared) == 5
    former = replace_storages(shared, place)
    assert len(former) == 2  # the tied parameter has the storage of the weight
    assert torch.equal(model.weight, expected)
    assert torch.equal(model.tied, expected.t())
    assert torch.equal(model.bias, bias)
    assert model.weight.data_ptr() == model.tied.data_ptr() == snapshot.address
    with torch.no_grad():
        model.weight[3, 4] = 7.0
    assert model.tied[4, 3] == model.rows[0, 3, 4] == 7.0
    assert model.plain[0].data_ptr() == model.bias.data_ptr()
    replace_storages(
        model.parameters(), lambda storage: torch.empty(storage.nbytes(), dtype=torch.int8)
    )
    snapshot.close()


def test_a_model_with_a_step_of_its_own_after_the_read_is_not_plain() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert is_plain(model)
    layer: Any = model[0]
    layer.quant_method = object()  # such as that of AWQ
    assert not is_plain(model)
    layer.quant_method = None
    assert is_plain(model)
    own: Any = model
    own.process_weights_after_loading = lambda: None
    assert not is_plain(model)


def config(**changes: Any) -> Any:
    kind = SimpleNamespace(
        quantization=None, is_moe=False, use_mla=False, using_transformers_backend=lambda: False
    )
    made = SimpleNamespace(
        model_config=kind,
        load_config=SimpleNamespace(load_format="auto", device=None),
        parallel_config=SimpleNamespace(world_size=1),
        speculative_config=None,
        lora_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


@pytest.mark.parametrize(
    "changes",
    [
        {"load_config__load_format": "bitsandbytes"},
        {"load_config__device": "cpu"},
        {"parallel_config__world_size": 2},
        {"speculative_config": object()},
        {"lora_config": object()},
        {"model_config__quantization": "fp8"},
        {"model_config__is_moe": True},
        {"model_config__use_mla": True},
        {"model_config__using_transformers_backend": lambda: True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_weights_that_change_after_the_read_are_not_read_in_place(changes: Any) -> None:
    assert may_be_in_place(config(), "auto")
    assert not may_be_in_place(config(), "gpupool-snapshot")
    assert not may_be_in_place(config(**changes), "auto")


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
