"""Weights in host memory, on the device while vLLM prepares their module, then in the snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")
pytest.importorskip("vllm", reason="the engine is not installed")

from torch import nn  # noqa: E402

from gpupoold.memory.emulated import EmulatedDevice  # noqa: E402
from gpupoold.memory.host_buffer import HostBuffer  # noqa: E402
from gpupoold.worker.weights.staging import HostWeights  # noqa: E402
from gpupoold.worker.weights.tensors import copy_out, host_bytes, plan_layout  # noqa: E402

LARGE = (512, 1024)
LARGE_BYTES = 4 * 512 * 1024
SMALL = (8, 1024)


class Layer(nn.Module):
    """A layer whose weights a method of vLLM's may prepare after the read."""

    weight: Any

    def __init__(self, *shape: int, quant_method: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(*shape))
        self.quant_method = quant_method
        self.rows = self.weight.data.view(2, -1)


class Bench:
    """Two layers that are prepared, and one that is not."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.rooms: list[int] = []
        layers = [
            Layer(*LARGE, quant_method=object()),
            Layer(*LARGE),
            Layer(*SMALL, quant_method=object()),
        ]
        self.contents = [layer.weight.detach().clone() for layer in layers]
        self.model: Any = nn.Sequential(*layers)
        self.host = HostWeights(device, self.rooms.append)
        self.host.hold(self.model, ())

    def prepare(self, layer: Any) -> None:
        with self.host.on_device(layer, torch.device("cpu")):
            layer.weight = nn.Parameter(layer.weight.t().contiguous())
            layer.folded = layer.weight.data[0] * 2.0

    def is_on_host(self, tensor: Any) -> bool:
        return tensor.untyped_storage().data_ptr() in self.host.storages


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = EmulatedDevice(64 << 20)
    yield Bench(device)
    device.close()


def test_one_module_at_a_time_is_on_the_device(bench: Bench) -> None:
    first, plain, last = bench.model
    assert all(bench.is_on_host(layer.weight) for layer in bench.model)
    assert bench.rooms == []
    with bench.host.on_device(first, torch.device("cpu")):
        assert [bench.is_on_host(layer.weight) for layer in bench.model] == [False, True, True]
        assert torch.equal(first.weight, bench.contents[0])
        assert first.rows.data_ptr() == first.weight.data_ptr(), "the view became a copy"
    assert bench.is_on_host(first.weight)
    assert first.rows.data_ptr() == first.weight.data_ptr()
    assert bench.rooms == [3 * LARGE_BYTES]
    bench.prepare(last)
    assert bench.is_on_host(last.weight)
    assert bench.is_on_host(last.folded)
    assert len(bench.rooms) == 1, "room is made for the largest module, once"
    before = plain.weight.data_ptr()
    with bench.host.on_device(plain, torch.device("cpu")):
        assert plain.weight.data_ptr() == before


def test_the_snapshot_has_what_was_prepared(bench: Bench) -> None:
    for layer in bench.model:
        bench.prepare(layer)
    bench.host.show_on_device(bench.model)
    layout = plan_layout(bench.model)
    snapshot = HostBuffer.create("snapshot", 16 << 20, is_populated=False)
    copy_out(layout, snapshot.address, bench.device, bench.host.storages)
    first, content = bench.model[0], bench.contents[0].t()
    for tensor, expected in ((first.weight, content), (first.folded, content[0] * 2.0)):
        at = layout.offsets[tensor.untyped_storage().data_ptr()]
        found = host_bytes(snapshot.address + at, tensor.nbytes).view(torch.float32)
        assert torch.equal(found.view(expected.shape), expected)
    left = {layer.rows.untyped_storage().data_ptr() for layer in bench.model}
    assert bench.host.storages.keys() <= left, "weights that were copied take memory"
    snapshot.close()


def test_large_weights_that_are_not_read_are_not_touched(bench: Bench) -> None:
    bench.host.is_unread = True
    first, _, last = bench.model
    with bench.host.on_device(first, torch.device("cpu")):
        assert not first.weight.any()
        first.weight = nn.Parameter(torch.empty(LARGE))
    assert bench.is_on_host(first.weight)
    with bench.host.on_device(last, torch.device("cpu")):
        assert torch.equal(last.weight, bench.contents[2]), "a scale may become a fraction"


def test_weights_move_with_all_views(bench: Bench) -> None:
    snapshot = HostBuffer.create("snapshot", 16 << 20)
    targets = iter(range(snapshot.address, snapshot.address + (16 << 20), 4 << 20))
    bench.host.move(bench.model, lambda _: next(targets))
    assert min(bench.host.storages) == bench.model[0].weight.data_ptr() == snapshot.address
    for layer, content in zip(bench.model, bench.contents, strict=True):
        assert torch.equal(layer.weight, content)
        assert layer.rows.data_ptr() == layer.weight.data_ptr()
    bench.model = None
    snapshot.close()
