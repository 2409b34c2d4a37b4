"""Weights and KV of models on ``CudaDevice``: what a turn loop does with it, in the same threads.

The fake driver objects to what a real one would fault on or quietly get wrong.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import pytest

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import AddressRange, Direction
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import KvGeometry, KvRow, Place
from gpupoold.memory.pages import OutOfPages, PagePool
from gpupoold.memory.transfers import TransferQueue
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.cuda_rig import COMPUTE, PAGE
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.ledger import MemoryLedger


class Model:
    """Weights of ten pages and KV of three layers, two blocks per page: an extent is two blocks."""

    def __init__(self, device: CudaDevice, pool: PagePool, host: KvHostCache, seed: int) -> None:
        self.bytes = random.Random(seed).randbytes(10 * PAGE - 8)
        snapshot = HostBuffer.create(f"test-{seed}", 10 * PAGE)
        ctypes.memmove(snapshot.address, self.bytes, len(self.bytes))
        self.weights = WeightMemory(AddressRange(device, pool, 10), device, snapshot)
        rows = tuple(KvRow(layer * 8 * PAGE, PAGE // 2, PAGE // 2) for layer in range(3))
        geometry = KvGeometry(16, PAGE, rows)
        self.kv = KvMemory(geometry, AddressRange(device, pool, geometry.num_pages), device, host)
        self.ledger = MemoryLedger(16)
        self.kv.attach(self.ledger)

    def write(self, driver: FakeCuda, blocks: list[int]) -> dict[int, bytes]:
        """Let kernels write to blocks; returns what they wrote, by address."""
        written = {}
        for block in blocks:
            for row in self.kv.geometry.rows:
                address = self.kv.address + row.offset + block * row.stride
                written[address] = random.Random(address).randbytes(row.num_bytes)
                # Kernels wait for the zeros of fresh pages, which would overwrite this.
                driver.kernel_read(address, 1)
                driver.kernel_write(address, written[address])
        return written

    def finish(self) -> None:
        """Wait for the transfers of the KV."""
        for place in (Place.LEAVING, Place.ARRIVING):
            self.kv.finish(place)

    def close(self) -> None:
        self.kv.close()
        self.weights.close()


Make = Callable[[PagePool, int], Model]


@pytest.fixture
def host(device: CudaDevice) -> Iterator[KvHostCache]:
    cache = KvHostCache(64 * PAGE, PAGE)
    cache.pin(device)
    yield cache
    cache.unpin(device)
    cache.close()


@pytest.fixture
def queues(device: CudaDevice) -> Iterator[dict[Direction, TransferQueue]]:
    """As a worker has them: a copy stream, a thread and a queue for each direction."""
    made = {
        direction: TransferQueue(device.open_copy_streams(direction), direction.name, 4 * PAGE)
        for direction in Direction
    }
    yield made
    for queue in made.values():
        queue.close()


@pytest.fixture
def make(device: CudaDevice, host: KvHostCache, queues: object) -> Iterator[Make]:
    """Models are closed before the queues, as in a worker."""
    made: list[Model] = []

    def make(pool: PagePool, seed: int) -> Model:
        made.append(Model(device, pool, host, seed))
        return made[-1]

    yield make
    for model in made:
        model.close()


def test_weights_survive_eviction(driver: FakeCuda, make: Make) -> None:
    pool = PagePool(12)
    one, two = make(pool, 1), make(pool, 2)
    for model, other in [(one, two), (two, one)] * 3:
        other.weights.evict()
        assert model.weights.load() == 10 * PAGE
        assert driver.kernel_read(model.weights.address, len(model.bytes)) == model.bytes
        driver.launch(COMPUTE)
    with pytest.raises(OutOfPages):
        one.weights.load()


def test_weights_come_in_while_kernels_run(
    driver: FakeCuda, make: Make, queues: dict[Direction, TransferQueue]
) -> None:
    pool = PagePool(20)
    one, two = make(pool, 1), make(pool, 2)
    one.weights.load()
    driver.launch(COMPUTE)
    waits = driver.calls["synchronize_stream"]
    two.weights.begin_load(queues[Direction.IN], 10)
    driver.launch(COMPUTE)
    two.weights.wait()
    assert COMPUTE in driver.busy_streams, "the second kernel has not been waited for"
    assert driver.calls["synchronize_stream"] == waits, "no stream has been synchronised"
    assert two.weights.load() == 0
    assert driver.kernel_read(two.weights.address, len(two.bytes)) == two.bytes


def test_a_kernel_reads_the_first_weights_while_others_arrive(
    driver: FakeCuda, make: Make, queues: dict[Direction, TransferQueue]
) -> None:
    model = make(PagePool(20), 1)
    model.weights.begin_load(queues[Direction.IN], 10)
    for num_pages in (1, 5, 10):
        model.weights.wait_for(num_pages * PAGE)
        expected = model.bytes[: num_pages * PAGE]
        assert driver.kernel_read(model.weights.address, len(expected)) == expected
        driver.launch(COMPUTE)
    assert model.weights.is_resident


def test_a_load_that_is_stopped_keeps_what_has_arrived(
    driver: FakeCuda, make: Make, queues: dict[Direction, TransferQueue]
) -> None:
    """Pitfall 4: stopping waits for what is under way before pages go."""
    model = make(PagePool(10), 1)
    for num_pages in (10, 7, 3):
        model.weights.begin_load(queues[Direction.IN], num_pages)
        model.weights.stop()
        model.weights.load()
        assert driver.kernel_read(model.weights.address, len(model.bytes)) == model.bytes
        model.weights.evict(num_pages)


def test_kv_is_paged_out_and_in_while_its_pages_serve_another_model(
    driver: FakeCuda, make: Make, queues: dict[Direction, TransferQueue]
) -> None:
    pool = PagePool(24)
    one, two = make(pool, 1), make(pool, 2)
    one.weights.load()
    one.kv.map([0, 1, 2])
    written = one.write(driver, one.ledger.allocate(4))
    for extent in (2, 1, 0):
        assert one.kv.begin_page_out([extent], queues[Direction.OUT])
    one.finish()
    one.weights.evict()
    two.weights.load()
    two.kv.map([0, 1, 2, 3])
    assert driver.kernel_read(two.kv.address, PAGE) == bytes(PAGE), "another model's bytes show"
    two.kv.unmap([3, 2, 1, 0])
    two.weights.evict()
    one.weights.load()
    for extent in one.kv.index.extents(Place.HOST):
        one.kv.begin_page_in([extent], queues[Direction.IN])
    one.finish()
    for address, data in written.items():
        assert driver.kernel_read(address, len(data)) == data
    one.kv.check_integrity()


def test_blocks_that_were_free_come_back_as_zeros(
    driver: FakeCuda, make: Make, queues: dict[Direction, TransferQueue]
) -> None:
    """Beside the blocks that are copied in, the fresh pages show no other model's bytes."""
    pool = PagePool(24)
    one, two = make(pool, 1), make(pool, 2)
    one.kv.map([0])
    written = one.write(driver, one.ledger.allocate(1))
    assert one.kv.begin_page_out([0], queues[Direction.OUT])
    one.finish()
    two.weights.load()
    two.weights.evict()
    one.kv.begin_page_in([0], queues[Direction.IN])
    one.finish()
    for row in one.kv.geometry.rows:
        page = one.kv.address + row.offset
        shown = driver.kernel_read(page, PAGE)
        expected = bytearray(PAGE)
        for address, data in written.items():
            if page <= address < page + PAGE:
                expected[address - page : address - page + len(data)] = data
        assert shown == bytes(expected)
