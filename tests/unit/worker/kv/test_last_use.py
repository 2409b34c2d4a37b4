"""The pages of a paused model wait for its last kernels, those of a running one for all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import AddressRange
from gpupoold.memory.pages import PagePool
from gpupoold.worker.kv.residency import LastUses
from tests.unit.memory.cuda_rig import COMPUTE, NUM_PAGES, PAGE
from tests.unit.memory.fake_cuda import FakeCuda


def test_each_model_has_a_moment_of_its_own() -> None:
    driver = FakeCuda(NUM_PAGES * PAGE)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: [COMPUTE])
    pool = PagePool(device.num_pages)
    uses = LastUses(device)
    models: dict[str, Any] = {}
    for name in "ab":
        ranges = [AddressRange(device, pool, 2) for _ in range(2)]
        for one in ranges:
            one.retain(range(2))
        owners = [SimpleNamespace(address_range=one) for one in ranges]
        models[name] = SimpleNamespace(name=name, kv=owners[0], weights=owners[1], ranges=ranges)
        uses.add(models[name])
    a, b = models["a"], models["b"]
    device.synchronize()

    def step(model: Any) -> None:
        address = model.ranges[0].address
        driver.launch(COMPUTE, address, address + 2 * PAGE)

    uses.run(a)
    step(a)
    uses.run(b)
    step(b)
    a.ranges[0].drop(range(1))
    assert driver.busy_streams == [COMPUTE]  # b's step goes on
    uses.run(a)
    step(a)  # a step of a again, so that its former moment means nothing
    a.ranges[0].drop(range(1, 2))
    assert driver.busy_streams == []
    uses.run(b)
    step(b)
    b.ranges[1].drop(range(2))  # b may launch more: all kernels are waited for
    assert driver.busy_streams == []
    for model in (a, b):
        uses.remove(model)
        for one in model.ranges:
            assert one.last_use is None
            one.close()
    device.close()
    assert driver.leaks == {}


def test_pages_of_a_model_that_is_paged_out_are_unmapped_beside_the_next_copies() -> None:
    """No kernel is waited for but the model's own, although no other model has run since."""
    driver = FakeCuda(NUM_PAGES * PAGE)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: [COMPUTE])
    pool = PagePool(device.num_pages)
    uses, pages = LastUses(device), AddressRange(device, pool, 2)
    pages.retain(range(2))
    nothing = SimpleNamespace(address_range=SimpleNamespace(last_use=None))
    owner = SimpleNamespace(address_range=pages)
    model: Any = SimpleNamespace(name="a", kv=nothing, weights=owner)
    uses.add(model)
    uses.run(model)
    driver.launch(COMPUTE, pages.address, pages.address + 2 * PAGE)
    uses.pause(model)
    uses.pause(model)
    del driver.log[:]
    pages.drop(range(2))
    assert "unmap" not in [call for call, _, _ in driver.log]
    assert driver.busy_streams == []
    uses.run(model)
    assert pages.last_use is None
    uses.remove(model)
    pages.close()
    device.close()
    assert driver.leaks == {}
