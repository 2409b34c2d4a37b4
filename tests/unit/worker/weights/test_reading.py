"""Threads that read ahead, and parameters that are views of a snapshot before the read."""

from __future__ import annotations

import contextlib
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
from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: E402

from gpupoold.memory.libc import is_untouched  # noqa: E402
from gpupoold.worker.weights.reading import (  # noqa: E402
    HostLoadFails,
    on_host,
    read_ahead,
    stays_as_read,
    why_on_device,
)

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


def test_modules_with_a_step_of_their_own_after_the_read() -> None:
    layer: Any = nn.Linear(2, 2)
    assert stays_as_read(layer)
    layer.quant_method = object()  # such as that of AWQ
    assert not stays_as_read(layer)
    layer.quant_method = None
    assert stays_as_read(layer)


def config(**changes: Any) -> Any:
    kind = SimpleNamespace(
        architecture="Made", quantization=None, using_transformers_backend=lambda: False
    )
    made = SimpleNamespace(
        model_config=kind,
        load_config=SimpleNamespace(load_format="auto", device=None),
        speculative_config=None,
        lora_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.rpartition("__")
        setattr(getattr(made, part) if part else made, name, value)
    return made


DRAFTER = SimpleNamespace(draft_model_config=object(), parallel_drafting=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"load_config__load_format": "bitsandbytes"}, "own way to read"),
        ({"load_config__device": "cpu"}, "own way to read"),
        ({"model_config__quantization": "torchao"}, "own way to read"),
        ({"model_config__using_transformers_backend": lambda: True}, "Transformers backend"),
        ({"speculative_config": DRAFTER, "lora_config": object()}, "drafter and adapters"),
        (
            {
                "speculative_config": SimpleNamespace(
                    draft_model_config=object(), parallel_drafting=True
                )
            },
            "drafter computes",
        ),
        ({"speculative_config": DRAFTER}, ""),
        ({"lora_config": object()}, ""),
        ({"model_config__quantization": "awq"}, ""),
    ],
)
def test_some_loads_need_device_memory_and_say_why(changes: Any, reason: str) -> None:
    assert why_on_device(config(), "auto") == ""
    assert why_on_device(config(), "gpupool-snapshot")
    found = why_on_device(config(**changes), "auto")
    assert reason in found
    assert bool(found) == bool(reason)


def test_what_torch_cannot_do_in_host_memory_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = config(device_config=SimpleNamespace(device="cpu"))

    def created(model: nn.Module, addresses: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(BaseModelLoader, "create_model", lambda *_: nn.Linear(2, 2))
    loader: Any = object()
    with (
        pytest.raises(HostLoadFails, match="no kernel"),
        on_host(made, created, lambda _: None, lambda module, _: contextlib.nullcontext(module)),
    ):
        BaseModelLoader.create_model(loader, made, made)
    assert made.load_config.device is None


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
