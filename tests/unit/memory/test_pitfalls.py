"""What other systems got wrong about memory."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpupoold.memory import pinning
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import AddressRange, Copy, CopyStream, Direction
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.pages import PagePool
from gpupoold.memory.transfers import TransferQueue
from tests.unit.memory.cuda.test_models import Model
from tests.unit.memory.cuda_rig import COMPUTE, NUM_PAGES, PAGE, mapped
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.rig import GatedCopyStream, Rig, fill_blocks, geometry_of, read, read_block

NUM_CYCLES = 200
# Driver calls that take long, or take memory: none of them belongs to a switch.
SLOW_CALLS = (
    *("create", "release", "reserve_addresses", "free_addresses", "create_stream"),
    *("register_host", "unregister_host"),
)


class Pair:
    """Two models on a fake GPU with room for one and a half, and the queues of a worker."""

    def __init__(self, device: CudaDevice, driver: FakeCuda) -> None:
        self.driver = driver
        self._device = device
        self.pool = PagePool(24)
        self._host = KvHostCache(64 * PAGE, 8 * PAGE)
        self._host.pin(device)
        self.ins = TransferQueue(device.open_copy_streams(Direction.IN), "in", 6 * PAGE)
        self.outs = TransferQueue(device.open_copy_streams(Direction.OUT), "out", 6 * PAGE)
        self.models = [Model(device, self.pool, self._host, seed) for seed in (1, 2)]

    def start(self, model: Model) -> dict[int, bytes]:
        """Bring a model in; a request of it fills four blocks."""
        model.weights.load()
        model.kv.map([0, 1, 2])
        return model.write(self.driver, model.ledger.allocate(4))

    def take_off(self, model: Model) -> None:
        for extent in model.kv.index.extents(Place.DEVICE):
            model.kv.begin_page_out([extent], self.outs)
        model.finish()
        model.weights.evict()

    def bring_back(self, model: Model, written: dict[int, bytes]) -> None:
        """As at a switch, half of the weights by prefetch; all bytes are what they were."""
        model.weights.begin_load(self.ins, 5)
        model.weights.load()
        for group in model.kv.groups_on_host([]):
            model.kv.begin_page_in([group[0]], self.ins)
        model.finish()
        self.driver.launch(COMPUTE)
        weights = self.driver.kernel_read(model.weights.address, len(model.bytes))
        assert weights == model.bytes
        for address, data in written.items():
            assert self.driver.kernel_read(address, len(data)) == data

    def slow_calls(self) -> dict[str, int]:
        return {call: self.driver.calls[call] for call in SLOW_CALLS}

    def close(self) -> None:
        """The ``device`` fixture checks that the driver has everything back."""
        for model in self.models:
            model.close()
        self.ins.close()
        self.outs.close()
        self._host.unpin(self._device)
        self._host.close()
        assert self.pool.num_free == self.pool.num_pages


class UnendingCopyStream(GatedCopyStream):
    """Its copies begin at once and end when they are allowed."""

    def __init__(self, copy_stream: CopyStream) -> None:
        super().__init__(copy_stream)
        self.allow(0)
        self.has_begun = threading.Event()

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        batch = self._copy_stream.begin(copies, after)
        self.has_begun.set()
        return batch

    def wait(self, batch: int) -> None:
        self.wait_until_allowed()
        super().wait(batch)


@pytest.fixture
def pair(device: CudaDevice, driver: FakeCuda) -> Iterator[Pair]:
    made = Pair(device, driver)
    yield made
    made.close()


def test_pitfall_02_nothing_is_unmapped_or_freed_twice(
    device: CudaDevice, driver: FakeCuda
) -> None:
    pool = PagePool(NUM_PAGES)
    address_range = AddressRange(device, pool, 4)
    address_range.retain(range(4))
    pages = address_range.physical_pages
    address_range.drop(range(1, 3))
    calls = driver.calls.copy()
    with pytest.raises(ValueError, match="not all held"):
        address_range.drop(range(4))
    assert driver.calls == calls, "nothing is done by halves"
    assert address_range.physical_pages == [pages[0], pages[3]]
    address_range.close()
    assert driver.calls["unmap"] == 3, "each page once"
    assert pool.num_free == NUM_PAGES


def test_pitfall_04_a_model_that_goes_ends_its_copies_first(
    pair: Pair, device: CudaDevice, driver: FakeCuda
) -> None:
    """The fake fails an unmap or unpin under a copy."""
    model = pair.models.pop()
    pair.start(model)
    pair.take_off(model)
    pair.start(pair.models[0])
    copy_streams = [UnendingCopyStream(device.open_copy_stream(Direction.IN)) for _ in range(2)]
    queues = [TransferQueue([copy_stream], "slow") for copy_stream in copy_streams]
    model.weights.begin_load(queues[0], 2)
    model.kv.begin_page_in([model.kv.index.extents(Place.HOST)[0]], queues[1])
    for copy_stream in copy_streams:
        copy_stream.has_begun.wait()
    assert len(driver.busy_streams) >= 2
    for copy_stream, close in zip(copy_streams, (model.weights.close, model.kv.close), strict=True):
        threading.Timer(0.02, copy_stream.allow).start()
        close()
    for queue in queues:
        queue.close()


def test_pitfalls_09_10_and_16_switches_keep_and_make_nothing(pair: Pair) -> None:
    """Nothing grows, all that was taken comes free, and nothing is made or pinned on the way."""
    written = {}
    for model in pair.models:
        written[model] = pair.start(model)
        pair.take_off(model)
    for model in pair.models:  # events are made when they are first needed
        pair.bring_back(model, written[model])
        pair.take_off(model)
    before, num_events = pair.slow_calls(), pair.driver.num_events
    for number in range(NUM_CYCLES):
        model = pair.models[number % 2]
        pair.bring_back(model, written[model])
        pair.take_off(model)
        assert pair.pool.num_free == pair.pool.num_pages
        assert "mappings" not in pair.driver.leaks
    assert pair.slow_calls() == before
    assert pair.driver.num_events <= num_events + 2


def test_pitfall_13_addresses_stay_while_pages_change(rig: Rig) -> None:
    """CUDA graphs have addresses burnt in, of weights and of KV."""
    weights, snapshot = rig.weights(8, "w")
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    weights.load()
    kv.map([1])
    written = fill_blocks(kv, ledger.allocate(2), "x")
    addresses, pages = (
        (weights.address, kv.address),
        weights.address_range.physical_pages + kv.address_range.physical_pages,
    )
    weights.evict()
    rig.page_out(kv, 1)
    rig.address_range(20).retain(range(20))
    weights.load()
    rig.page_in(kv, 1)
    assert (weights.address, kv.address) == addresses
    assert not set(weights.address_range.physical_pages + kv.address_range.physical_pages) & set(
        pages
    )
    assert read(weights.address, len(snapshot)) == snapshot
    assert {block: read_block(kv, block) for block in written} == written


def test_pitfall_19_blocks_on_their_way_out_are_nobodys(rig: Rig) -> None:
    """Neither the engine nor another model may write to them before the copy has ended."""
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    written = fill_blocks(kv, blocks := ledger.allocate(3), "x")
    with rig.copies_held():
        kv.begin_page_out([1, 2], rig.outs)
        ledger.release(blocks[1:])  # two requests are preempted or cancelled meanwhile
        kv.discard_dead()
        assert ledger.num_free == 0
        rig.soil()  # whatever pages others can have
        assert {block: read_block(kv, block) for block in written} == written
    rig.finish(kv)
    rig.soil()
    rig.page_in(kv, 1)
    assert read_block(kv, blocks[0]) == written[blocks[0]]


def test_pitfall_21_blocks_side_by_side_are_one_copy(pair: Pair) -> None:
    """Copies of less than 28 KiB are slow: neighbours are joined, whoever's block they are."""
    model = pair.models[0]
    pair.start(model)  # blocks 1 to 4: extents 0 to 2, of two blocks in each of three layers
    pair.driver.batches.clear()
    pair.take_off(model)
    sizes = [num_bytes for batch in pair.driver.batches for _, _, num_bytes in batch]
    assert sum(sizes) == 4 * 3 * PAGE // 2
    assert sorted(sizes) == [PAGE // 2] * 6 + [PAGE] * 3, "block 1, blocks 2 and 3, block 4"


def test_pitfall_22_what_an_engine_forgets_is_still_on_the_host(rig: Rig) -> None:
    """Slots are outside of the engines: no reset of one's caches touches them."""
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    other, others = rig.kv(geometry_of("small-blocks"))
    written = {}
    for memory, engine in ((kv, ledger), (other, others)):
        memory.map([1])
        written[memory] = fill_blocks(memory, blocks := engine.allocate(2), "x")
        engine.remember(blocks[0], "prefix")
        rig.page_out(memory, 1)
    ledger.forget(list(written[kv]))  # its prefix cache is reset
    with other.with_reserved_blocks():
        others.release(list(written[other]))  # all its requests are preempted
    other.discard_dead()
    assert other.host_bytes == 0
    rig.soil()
    rig.page_in(kv, 1)
    assert {block: read_block(kv, block) for block in written[kv]} == written[kv]


@pytest.mark.parametrize("fail_in", [1, 2, 3])
def test_pitfall_29_a_extent_that_cannot_be_mapped_whole_is_not_mapped(
    rig: Rig, fail_in: int
) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))  # a page in each of three layers
    rig.device.fail_in = fail_in
    with pytest.raises(OSError, match="too many mappings"):
        kv.map([1])
    assert (rig.pool.num_free, kv.resident_bytes, ledger.num_free) == (64, 0, 0)
    kv.check_integrity()
    kv.map([1])
    assert ledger.num_free == 2


def test_pitfall_29_two_threads_that_pin_lose_no_registration(
    device: CudaDevice, snapshot: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn loop loads a model while another thread pins the snapshot of a second one."""
    is_slow, other_is_done = threading.Event(), threading.Event()

    def slow_bisect(values: Sequence[int], value: int) -> int:
        found = bisect_left(values, value)
        if not is_slow.is_set():
            is_slow.set()
            other_is_done.wait(0.2)  # the thread has lost its turn here
        return found

    monkeypatch.setattr(pinning, "bisect_left", slow_bisect)
    copy_stream = device.open_copy_stream(Direction.IN)
    with ThreadPoolExecutor(
        1, "snapshots", lambda: copy_stream.wait(copy_stream.begin([], 0))
    ) as snapshots:
        other = snapshots.submit(device.pin, snapshot.address, PAGE)
        is_slow.wait()
        device.pin(snapshot.address + 4 * PAGE, PAGE)
        other_is_done.set()
        other.result()
    with mapped(device, 5) as address_range:
        device.copy_in(address_range, snapshot.address, 5 * PAGE)  # across both: the fake objects
    copy_stream.close()
