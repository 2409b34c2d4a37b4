"""Errors of other systems in switching models."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="the engine is not installed")

from torch import Tensor, nn  # noqa: E402

from gpupoold.memory.device import AddressRange, Direction  # noqa: E402
from gpupoold.memory.emulated import EmulatedDevice  # noqa: E402
from gpupoold.memory.host_buffer import HostBuffer  # noqa: E402
from gpupoold.memory.kv_extents import Place  # noqa: E402
from gpupoold.memory.pages import PagePool  # noqa: E402
from gpupoold.memory.transfers import TransferQueue  # noqa: E402
from gpupoold.memory.weights import WeightMemory  # noqa: E402
from gpupoold.wire.messages import RunTurn  # noqa: E402
from gpupoold.worker.turns.requests import Orders  # noqa: E402
from gpupoold.worker.weights import tensors  # noqa: E402
from gpupoold.worker.weights.loading import ModelLoad  # noqa: E402
from tests.unit.memory.rig import PAGE, GatedCopyStream, pattern, read, write  # noqa: E402
from tests.unit.worker.kv.residency_box import WEIGHT_PAGES, Box  # noqa: E402

NUM_PAGES = 16


@pytest.fixture
def tight_box() -> Iterator[Box]:
    """Room for one model of three and a half."""
    made = Box(34)
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(NUM_PAGES * PAGE, PAGE)
    yield opened
    opened.close()


class Memory(bytearray):
    """Bytes for a tensor; can be referred to weakly."""


class Loaded(nn.Module):
    """A model as vLLM leaves it: strides of its own, a buffer that no checkpoint has."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(pattern("weights", 4 * 64 * 48))
        flat = torch.frombuffer(self.memory, dtype=torch.float32)
        self.transposed = nn.Parameter(flat.view(64, 48).t(), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.25, 4.0]), persistent=False)
        self.alias = self.transposed  # as tied embeddings are


class Migrated:
    """``model`` in an address range of ``device``, by way of its snapshot."""

    def __init__(self, device: EmulatedDevice, model: nn.Module) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.layout = tensors.plan_layout(model)
        num_pages = -(-self.layout.num_bytes // PAGE)
        snapshot = HostBuffer.create("test-snapshots", num_pages * PAGE)
        tensors.copy_out(self.layout, snapshot.address, device, {})
        address_range = AddressRange(device, self.pool, num_pages)
        self.weights = WeightMemory(address_range, device, snapshot)
        tensors.relocate(self.layout, address_range.address, device)


def test_pitfall_02_a_tensor_that_is_collected_frees_nothing(device: EmulatedDevice) -> None:
    """Its pages may be mapped, unmapped or another's by then: they were never the tensor's."""
    pool = PagePool(NUM_PAGES)
    address_range = AddressRange(device, pool, 2)
    address_range.retain(range(2))
    tensor = tensors.over(device, address_range.address, 2 * PAGE)
    address_range.drop(range(2))
    del tensor
    gc.collect()
    address_range.retain(range(2))
    write(address_range.address, b"still there")
    assert read(address_range.address, 11) == b"still there"
    address_range.close()
    assert pool.num_free == NUM_PAGES


def test_pitfalls_07_13_and_14_all_of_a_model_comes_back_as_it_was(device: EmulatedDevice) -> None:
    """Parameters and buffers, bytes, addresses and the layout that post-processing made."""
    model = Loaded()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale, strides = model.scale.clone(), model.transposed.stride()
    moved = Migrated(device, model)
    moved.weights.load()
    addresses = [model.transposed.data_ptr(), model.scale.data_ptr()]
    address_range = range(moved.weights.address, moved.weights.address + moved.weights.num_bytes)
    assert all(address in address_range for address in addresses)
    moved.weights.evict()
    other = AddressRange(device, moved.pool, NUM_PAGES)
    other.retain(range(NUM_PAGES))
    write(other.address, b"\xee" * (NUM_PAGES * PAGE))
    other.close()
    moved.weights.load()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(model.scale, scale), "a buffer that is in no state_dict"
    assert model.transposed.stride() == strides == (1, 48)
    assert [model.transposed.data_ptr(), model.scale.data_ptr()] == addresses
    assert model.alias is model.transposed
    moved.weights.close()


def test_pitfall_12_no_second_copy_of_the_weights_is_left(device: EmulatedDevice) -> None:
    model = Loaded()
    memory = weakref.ref(model.memory)
    del model.memory
    assert memory() is not None
    moved = Migrated(device, model)
    gc.collect()
    assert memory() is None
    moved.weights.close()


def test_pitfall_08_waking_twice_or_by_halves_is_waking_once(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    written = box.ask("a", 2)
    box.residency.page_out("a")
    box.residency.prefetch("a", "b")  # a part of it, perhaps
    box.residency.stop_prefetch()
    for _ in range(3):
        box.switch_in("a")
        box.residency.bring_all("a")
        pages = (
            box.weights("a").address_range.physical_pages
            + box.models["a"].kv.address_range.physical_pages
        )
        assert box.kv_bytes("a", written) == written
    assert box.residency.switch_in("a") is None
    assert box.weights("a").load() == 0
    assert (
        box.weights("a").address_range.physical_pages
        + box.models["a"].kv.address_range.physical_pages
        == pages
    )


def test_pitfall_20_kv_that_nothing_makes_room_for_is_computed_anew(tight_box: Box) -> None:
    """Else the model would wait for ever: nothing runs, nothing comes free."""
    box = tight_box
    box.switch_in("a")
    box.ask("a", 3)
    box.residency.page_out("a")
    lost = box.rig.pool.allocate(34 - WEIGHT_PAGES - 3 - 2)  # a chunk needs three pages
    box.residency.switch_in("a")
    assert box.models["a"].num_preempted == 1
    assert box.models["a"].kv.is_whole
    assert box.rig.host.used_bytes == 0
    box.rig.pool.free(lost)
    box.residency.check_integrity()


def test_pitfall_27_a_full_device_raises_nothing(tight_box: Box) -> None:
    """What cannot be had is not had; the engine lets requests wait or preempts some."""
    box = tight_box
    box.switch_in("a")
    box.ask("a", 2)
    model = box.models["a"]
    model.num_wanted = 11
    for _ in range(3):
        box.residency.ensure_kv("a")
        box.residency.advance("a")
    assert box.rig.pool.num_free < 3
    assert 0 < model.ledger.num_free < model.num_wanted
    box.residency.prefetch("b", "a")
    box.residency.advance("a")
    assert box.weights("a").is_resident
    assert box.models["a"].is_ready()
    box.residency.check_integrity()


def test_pitfall_28_a_copy_that_hangs_stops_no_other_model() -> None:
    box = Box(60)
    box.switch_in("a")
    gate = GatedCopyStream(box.rig.device.open_copy_stream(Direction.IN))
    gate.allow(0)
    watchdog = threading.Timer(10, gate.allow)  # whoever waits for the copy waits so long
    watchdog.start()
    box.residency._in.close()
    box.residency._in = TransferQueue([gate], "copy-in")
    taken = box.rig.pool.allocate(15)
    box.residency.prefetch("b", "a")
    assert box.weights("b").num_arriving
    box.rig.pool.free(taken)  # so that there would be more to prefetch
    for _ in range(3):
        box.residency.advance("a")
        written = box.ask("a", 1)
        assert box.models["a"].is_ready()
        assert box.kv_bytes("a", written) == written
    assert gate.is_closed
    assert box.weights("b").num_arriving == 2
    assert not box.weights("b").is_resident
    box.residency.check_integrity()
    watchdog.cancel()
    gate.allow()
    box.switch_in("b")
    box.close()


def test_pitfall_30_the_null_block_is_there_whenever_a_model_runs(tight_box: Box) -> None:
    """Kernels may touch block 0 at any step, whichever blocks are in use."""
    box = tight_box
    box.switch_in("a")
    box.ask("a", 3)
    box.switch_in("b")
    box.ask("b", 3)  # a's KV leaves
    box.switch_in("a")  # b's KV leaves, so that pages are short while a's comes
    assert box.models["a"].is_ready()
    assert 0 in box.models["a"].kv.index.extents(Place.DEVICE)


def test_pitfall_31_kv_is_sized_by_the_device_not_by_what_is_free(device: EmulatedDevice) -> None:
    pool = PagePool(NUM_PAGES)
    budgets = []
    for num_taken in (0, 9):
        others = pool.allocate(num_taken)
        load = ModelLoad("model", device, pool)
        load.take_weights(Loaded())
        budgets.append(load.kv_budget_bytes([PAGE]))
        assert load.weights is not None
        load.weights.close()
        pool.free(others)
    num_weight_pages = -(-4 * 64 * 48 // PAGE) + 1  # the buffer begins a page
    assert budgets == [(NUM_PAGES - num_weight_pages) * PAGE] * 2


def test_pitfall_33_an_order_that_crossed_with_an_end_is_old_news() -> None:
    """The daemon changes a turn that it does not know to be over: nothing begins anew."""
    orders = Orders()
    orders.take(RunTurn(1, "a", 0.1, "b"))
    orders.began(10.0)
    assert orders.end() == (1, "b")
    orders.take(RunTurn(1, "a", 9.0, "c"))
    assert (orders.turn, orders.then) == (None, None)
    orders.take(RunTurn(2, "b", 0.1))
    orders.take(RunTurn(1, "a", 9.0, "c"))
    assert orders.turn is not None
    assert (orders.turn.model, orders.then) == ("b", None)
