"""What a load does with a GPU's memory, on the fake CUDA driver; torch itself stays on the CPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")

from gpupoold.domain import ModelName  # noqa: E402
from gpupoold.memory.cuda.device import CudaDevice  # noqa: E402
from gpupoold.memory.cuda.driver import CudaError  # noqa: E402
from gpupoold.memory.device import AddressRange  # noqa: E402
from gpupoold.memory.emulated import EmulatedDevice  # noqa: E402
from gpupoold.memory.host_buffer import HostBuffer  # noqa: E402
from gpupoold.memory.pages import PagePool  # noqa: E402
from gpupoold.wire.messages import ModelToLoad  # noqa: E402
from gpupoold.worker.weights import tensors  # noqa: E402
from gpupoold.worker.weights.loading import (  # noqa: E402
    ModelLoad,
    pages_for_torch,
)
from gpupoold.worker.weights.staging import TorchRelease  # noqa: E402
from gpupoold.worker.weights.tensors import copy_out, plan_layout  # noqa: E402
from tests.unit.memory.fake_cuda import FakeCuda  # noqa: E402

PAGE = 4096
NUM_PAGES = 64


@pytest.fixture
def driver() -> FakeCuda:
    return FakeCuda(total_bytes=NUM_PAGES * PAGE)


@pytest.fixture
def device(driver: FakeCuda) -> Iterator[CudaDevice]:
    opened = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    yield opened
    opened.close()
    assert driver.leaks == {}


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[PagePool]:
    """Every test ends with all pages free."""
    made = PagePool(device.num_pages)
    yield made
    made.check_integrity()
    assert made.num_free == made.num_pages


class TestTorchRelease:
    def test_torch_has_the_memory_during_the_loan(
        self, device: CudaDevice, pool: PagePool, driver: FakeCuda
    ) -> None:
        released = TorchRelease(device, pool)
        released.release(10)
        assert driver.free_bytes == 10 * PAGE
        assert pool.num_free == NUM_PAGES - 10
        released.reclaim()
        released.reclaim()
        assert driver.free_bytes == 0

    def test_lends_what_there_is(self, device: CudaDevice, pool: PagePool) -> None:
        held = pool.allocate(60)
        released = TorchRelease(device, pool)
        released.release(10)
        assert device.free_bytes() == 4 * PAGE
        released.reclaim()
        pool.free(held)

    def test_memory_that_does_not_come_back_is_an_error(
        self, device: CudaDevice, pool: PagePool, driver: FakeCuda
    ) -> None:
        released = TorchRelease(device, pool)
        released.release(3)
        driver.taken_bytes = PAGE
        with pytest.raises(CudaError, match="out of memory"):
            released.reclaim()
        driver.taken_bytes = 0
        released.reclaim()

    def test_frames_of_a_failed_load_let_their_tensors_go(
        self, device: CudaDevice, pool: PagePool, driver: FakeCuda
    ) -> None:
        class Tensor:
            """Frees its device memory when nobody refers to it any more."""

            def __init__(self) -> None:
                driver.taken_bytes += 2 * PAGE

            def __del__(self) -> None:
                driver.taken_bytes -= 2 * PAGE

        def build() -> None:
            weights = Tensor()
            try:
                raise MemoryError(f"in the middle of a load with {weights is not None}")
            except MemoryError as error:
                raise ValueError("load failed") from error

        def load() -> None:
            try:
                build()
            except ValueError as error:
                assert driver.free_bytes == 0
                released.drop_garbage(error)
                released.reclaim()
                raise

        released = TorchRelease(device, pool)
        released.release(2)
        with pytest.raises(ValueError, match="load failed"):
            load()


class TestPagesToLend:
    def test_covers_the_weights_and_some_more(
        self, device: CudaDevice, tiny_models: dict[str, Path]
    ) -> None:
        path = tiny_models["tiny-llama"]
        weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        device.num_pages, all_pages = 1 << 40, device.num_pages
        num_bytes = pages_for_torch(_model(path, "float32"), device) * PAGE
        device.num_pages = all_pages
        assert 1.05 * weight_bytes < num_bytes - (1 << 30) < 1.2 * weight_bytes

    def test_no_more_than_there_is(self, device: CudaDevice, tiny_models: dict[str, Path]) -> None:
        assert pages_for_torch(_model(tiny_models["tiny-llama"], "auto"), device) == NUM_PAGES

    def test_an_emulated_device_needs_no_slack(self, tiny_models: dict[str, Path]) -> None:
        path = tiny_models["tiny-llama"]
        weight_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        device = EmulatedDevice(1 << 30)
        num_bytes = pages_for_torch(_model(path, "float32"), device) * device.page_bytes
        device.close()
        assert 1.05 * weight_bytes < num_bytes < 1.2 * weight_bytes


class TestKvScratch:
    def test_every_address_is_readable_and_writable_meanwhile(
        self, device: CudaDevice, pool: PagePool, driver: FakeCuda
    ) -> None:
        load = ModelLoad("model", device, pool)
        load.kv_address_range = address_range = AddressRange(
            device, pool, 2 * NUM_PAGES
        )  # more than there is
        held = pool.allocate(NUM_PAGES - 1)
        with load.kv_scratch():
            assert driver.kernel_read(address_range.address, PAGE) == bytes(PAGE)
            for page in (0, 77, 2 * NUM_PAGES - 1):
                driver.kernel_write(address_range.address + page * PAGE, b"warm-up")
        pool.free(held)
        address_range.check_integrity()
        address_range.close()

    def test_ends_when_the_warm_up_fails(self, device: CudaDevice, pool: PagePool) -> None:
        load = ModelLoad("model", device, pool)

        def warm_up() -> None:
            with load.active():
                load.kv_address_range = AddressRange(device, pool, 8)
                with load.kv_scratch():
                    raise ValueError("no such kernel")

        with pytest.raises(ValueError, match="kernel"):
            warm_up()

    def test_a_model_without_kv_needs_none(self, device: CudaDevice, pool: PagePool) -> None:
        with ModelLoad("model", device, pool).kv_scratch():
            assert pool.num_free == NUM_PAGES


class TestModelLoad:
    def test_a_failed_load_ends_its_loan(
        self, device: CudaDevice, pool: PagePool, driver: FakeCuda
    ) -> None:
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                architecture="Made", quantization=None, using_transformers_backend=lambda: False
            ),
            load_config=SimpleNamespace(load_format="mistral", device=None),
            parallel_config=SimpleNamespace(world_size=1),
            speculative_config=None,
        )
        load = ModelLoad("model", device, pool, num_released_pages=9)

        def build() -> None:
            with load.active(), load.reading(config):
                assert driver.free_bytes == 9 * PAGE
                raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            build()
        assert driver.free_bytes == 0


def test_an_snapshot_is_written_by_the_devices_own_copies(
    device: CudaDevice, pool: PagePool, driver: FakeCuda
) -> None:
    """Into pinned memory, in parts where registrations meet, which torch's copies may not cross."""
    address_range = AddressRange(device, pool, 3)
    address_range.retain(range(3))
    data = bytes(range(256)) * (2 * PAGE // 256)
    driver.kernel_write(address_range.address + PAGE, data)
    # Torch takes the tensor for one of the host's, but its address is one of the fake GPU's.
    on_device = type("OnDevice", (torch.Tensor,), {"is_cuda": True})
    at = tensors.at_pointer(address_range.address + PAGE, 2 * PAGE, torch.device("cpu"))
    model = torch.nn.Module()
    model.register_buffer("weights", at.as_subclass(on_device))
    model.register_buffer("scale", torch.tensor([0.25, 4.0]))
    layout = plan_layout(model)
    snapshot = HostBuffer.create("snapshot", 3 * PAGE)
    halves = (snapshot.address, PAGE), (snapshot.address + PAGE, 2 * PAGE)
    for half in halves:
        device.pin(*half)
    copy_out(layout, snapshot.address, device, {})
    found = ctypes.string_at(snapshot.address, layout.num_bytes)
    assert found[: 2 * PAGE] == data
    assert found[2 * PAGE :][:8] == struct.pack("2f", 0.25, 4.0)
    for half in halves:
        device.unpin(*half)
    snapshot.close()
    address_range.close()


def test_a_tensor_over_a_pointer_is_the_memory_there() -> None:
    memory = (ctypes.c_int8 * 64)()
    tensor = tensors.at_pointer(ctypes.addressof(memory), 64, torch.device("cpu"))
    tensor[3] = 7
    assert memory[3] == 7
    assert tensor.shape == (64,)
    assert tensor.dtype == torch.int8
    del tensor
    assert memory[3] == 7


def _model(path: Path, dtype: str) -> ModelToLoad:
    return ModelToLoad(name=ModelName("model"), source="a", path=str(path), dtype=dtype)
