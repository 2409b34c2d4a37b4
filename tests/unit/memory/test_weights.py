"""Weight memory: the snapshot comes in whole, at the same address, or not at all."""

from __future__ import annotations

import threading

import pytest

from gpupoold.errors import Failed
from gpupoold.memory import weights as weights_module
from gpupoold.memory.device import Direction
from gpupoold.memory.libc import NO_NODE
from gpupoold.memory.pages import OutOfPages
from gpupoold.memory.transfers import TransferQueue
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.rig import PAGE, GatedCopyStream, Rig, pattern, read, write


def test_load_evict_load(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    assert (weights.num_pages, weights.num_bytes) == (10, 10 * PAGE)
    address = weights.address
    assert weights.load() == 10 * PAGE
    assert read(address, 10 * PAGE) == data
    assert weights.load() == 0
    weights.evict()
    weights.evict()
    assert (weights.is_resident, rig.pool.num_free) == (False, 64)
    rig.soil()
    assert weights.load() == 10 * PAGE
    assert weights.address == address
    assert read(address, 10 * PAGE) == data


def test_two_models_swap_on_a_device_for_one(rig: Rig) -> None:
    models = [rig.weights(40, name) for name in ("a", "b")]
    for weights, data in models * 3:
        weights.load()
        assert read(weights.address, len(data)) == data
        weights.evict()


def test_a_part_stays_and_is_not_moved_again(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    weights.load()
    weights.evict(3)
    assert (weights.is_resident, weights.missing_bytes) == (False, 3 * PAGE)
    assert (weights.loaded_bytes, rig.pool.num_free) == (7 * PAGE, 64 - 7)
    assert read(weights.address, 7 * PAGE) == data[: 7 * PAGE]
    rig.soil()
    assert weights.load() == 3 * PAGE
    assert read(weights.address, 10 * PAGE) == data


def test_what_was_begun_is_not_moved_again(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    rig.soil()
    weights.begin_load(rig.ins, 6)
    assert (weights.num_mapped_pages, weights.missing_bytes) == (6, 4 * PAGE)
    assert not weights.is_resident
    assert weights.load() == 4 * PAGE
    assert read(weights.address, 10 * PAGE) == data
    weights.begin_load(rig.ins, 6)
    assert weights.is_resident


def test_a_stopped_load_keeps_what_has_arrived(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    weights.begin_load(rig.ins, 10)
    weights.stop()
    there = weights.loaded_bytes
    assert there == weights.mapped_bytes
    assert there % (2 * PAGE) == 0
    assert rig.pool.num_free == 64 - there // PAGE
    assert weights.load() == 10 * PAGE - there
    assert read(weights.address, 10 * PAGE) == data


def test_a_load_that_cannot_begin_changes_nothing(rig: Rig) -> None:
    (first, _), (second, _) = rig.weights(60, "a"), rig.weights(10, "b")
    first.load()
    with pytest.raises(OutOfPages):
        second.begin_load(rig.ins, 10)
    assert (second.num_mapped_pages, rig.pool.num_free) == (0, 4)
    second.begin_load(rig.ins, 4)
    second.wait()
    assert second.loaded_bytes == 4 * PAGE


def test_a_broken_copy_is_given_up(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    rig.in_copy_stream.error = OSError("the link is broken")
    weights.begin_load(rig.ins, 10)
    with pytest.raises(OSError, match="the link is broken"):
        weights.wait()
    assert (weights.num_mapped_pages, rig.pool.num_free) == (0, 64)
    assert weights.load() == 10 * PAGE
    assert read(weights.address, 10 * PAGE) == data


def test_no_room_changes_nothing(rig: Rig) -> None:
    (first, data), (second, _) = rig.weights(40, "a"), rig.weights(30, "b")
    first.load()
    with pytest.raises(OutOfPages):
        second.load()
    assert not second.is_resident
    assert rig.pool.num_free == 24
    assert read(first.address, len(data)) == data


def test_an_snapshot_goes_and_comes_back(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    weights.begin_load(rig.ins, 6)
    snapshot = weights.detach_snapshot()
    assert (weights.has_snapshot, weights.is_resident, rig.pool.num_free) == (False, False, 64)
    assert weights.missing_bytes == weights.num_bytes == 10 * PAGE
    for bring_in in (weights.load, lambda: weights.begin_load(rig.ins, 1), weights.detach_snapshot):
        with pytest.raises(Failed, match="not in host memory"):
            bring_in()
    assert rig.pool.num_free == 64
    weights.evict()
    rig.soil()
    weights.attach_snapshot(snapshot)
    assert weights.load() == 10 * PAGE
    assert read(weights.address, 10 * PAGE) == data


def test_weights_without_an_snapshot_can_be_closed(rig: Rig) -> None:
    weights, _ = rig.weights(10, "w")
    weights.load()
    weights.detach_snapshot().close()  # the rig closes the rest


def test_an_snapshot_of_another_size_is_not_taken(rig: Rig) -> None:
    weights, _ = rig.weights(10, "w")
    other, _ = rig.weights(11, "x")
    snapshot = weights.detach_snapshot()
    with pytest.raises(AssertionError):
        weights.attach_snapshot(other.snapshot)
    weights.attach_snapshot(snapshot)
    with pytest.raises(AssertionError):
        weights.attach_snapshot(snapshot)


def test_the_snapshot_covers_the_address_range(rig: Rig) -> None:
    weights, _ = rig.weights(4, "a")
    with pytest.raises(AssertionError):
        WeightMemory(rig.address_range(5), rig.device, weights.snapshot)


def test_slots_follow_the_snapshot_in_pieces_of_any_size(rig: Rig) -> None:
    weights, data = rig.weights(6, "w", num_own_pages=4)
    assert (weights.num_pages, weights.own_bytes) == (10, 4 * PAGE)
    assert (weights.num_bytes, weights.snapshot_bytes) == (10 * PAGE, 6 * PAGE)
    for num_pages in (1, 5, 7, 10):
        rig.soil()
        while not weights.is_resident:
            weights.load(num_pages)
        assert read(weights.address, 10 * PAGE) == data
        weights.evict(num_pages)
        weights.begin_load(rig.ins, num_pages)
        weights.wait()
        assert read(weights.address, 10 * PAGE) == data
        weights.evict()


def test_written_slots_come_back_after_an_eviction(rig: Rig) -> None:
    weights, data = rig.weights(6, "w", num_own_pages=4)
    weights.load()
    written = pattern("written", 2 * PAGE)
    write(weights.address + 7 * PAGE, written)
    weights.write_back()
    weights.evict()
    rig.soil()
    weights.load()
    assert read(weights.address, 10 * PAGE) == data[: 7 * PAGE] + written + data[9 * PAGE :]
    assert read(weights.snapshot.address, 6 * PAGE) == data[: 6 * PAGE]


def test_slots_stay_while_the_snapshot_is_away(rig: Rig) -> None:
    weights, data = rig.weights(6, "w", num_own_pages=4)
    weights.load()
    snapshot = weights.detach_snapshot()
    with pytest.raises(Failed, match="not in host memory"):
        weights.load()
    weights.attach_snapshot(snapshot)
    weights.load()
    assert read(weights.address, 10 * PAGE) == data


def test_slots_are_written_back_only_while_resident(rig: Rig) -> None:
    weights, _ = rig.weights(6, "w", num_own_pages=4)
    weights.load(8)
    with pytest.raises(AssertionError):
        weights.write_back()


def test_a_load_short_of_pages_keeps_the_part_that_is_present(rig: Rig) -> None:
    (first, _), (second, data) = rig.weights(56, "a"), rig.weights(6, "b", num_own_pages=4)
    first.load()
    with pytest.raises(OutOfPages):
        second.load()
    assert (second.loaded_bytes, second.num_mapped_pages) == (6 * PAGE, 6)
    first.evict()
    assert second.load() == 4 * PAGE
    assert read(second.address, 10 * PAGE) == data


def test_a_load_follows_the_loads_in_progress(rig: Rig) -> None:
    gate = GatedCopyStream(rig.device.open_copy_stream(Direction.IN))
    gate.allow(0)
    queue = TransferQueue([gate], "gated")
    weights, snapshot = rig.weights(12, "w")
    weights.begin_load(queue, 5)
    weights.begin_load(queue, 5)
    assert (weights.num_arriving, weights.num_mapped_pages) == (2, 10)
    assert weights.loaded_bytes == 0
    gate.allow()
    weights.wait()
    assert weights.loaded_bytes == 10 * PAGE
    assert read(weights.address, 10 * PAGE) == snapshot[: 10 * PAGE]
    weights.close()
    queue.close()


def test_a_stop_keeps_nothing_behind_a_load_that_was_stopped(rig: Rig) -> None:
    gate = GatedCopyStream(rig.device.open_copy_stream(Direction.IN))
    gate.allow(0)
    queue = TransferQueue([gate], "gated")
    weights, _ = rig.weights(12, "w")
    for _ in range(2):
        weights.begin_load(queue, 5)
    threading.Timer(0.05, gate.allow).start()
    weights.stop()
    assert not weights.num_arriving
    assert weights.num_mapped_pages * PAGE == weights.loaded_bytes
    assert weights.num_mapped_pages in (0, 5)
    weights.close()
    queue.close()


def held_load(rig: Rig, num_pages: int) -> tuple[WeightMemory, bytes, GatedCopyStream]:
    """All pages mapped, none copied: each batch has two pages and waits for the gate."""
    gate = GatedCopyStream(rig.device.open_copy_stream(Direction.IN))
    gate.allow(0)
    weights, data = rig.weights(num_pages, "w")
    weights.begin_load(TransferQueue([gate], "held", batch_bytes=2 * PAGE), num_pages)
    return weights, data, gate


def test_the_first_bytes_are_waited_for(rig: Rig) -> None:
    weights, data, gate = held_load(rig, 12)
    gate.allow(3)
    weights.wait_for(3 * PAGE)
    assert 3 * PAGE <= weights.present_bytes <= 6 * PAGE
    assert weights.arriving_bytes == 12 * PAGE - weights.present_bytes
    assert read(weights.address, 3 * PAGE) == data[: 3 * PAGE]
    assert not weights.is_resident
    gate.allow()
    weights.wait_for(12 * PAGE)
    assert weights.is_resident
    assert read(weights.address, 12 * PAGE) == data


def test_bytes_of_several_loads_are_waited_for(rig: Rig) -> None:
    weights, data = rig.weights(12, "w")
    weights.load(4)
    weights.begin_load(rig.ins, 4)
    weights.begin_load(rig.ins, 4)
    for num_bytes in (1, 5 * PAGE, 8 * PAGE, 9 * PAGE + 1, 12 * PAGE):
        weights.wait_for(num_bytes)
        assert read(weights.address, num_bytes) == data[:num_bytes]
    assert weights.is_resident


def test_bytes_that_do_not_arrive_are_not_waited_for_for_ever(rig: Rig) -> None:
    weights, _ = rig.weights(12, "w")
    weights.load(4)
    weights.wait_for(4 * PAGE)
    with pytest.raises(AssertionError):
        weights.wait_for(4 * PAGE + 1)


def test_a_failed_copy_ends_the_wait_for_its_bytes(rig: Rig) -> None:
    weights, data, gate = held_load(rig, 12)
    gate.error = OSError("the link is broken")
    gate.allow()
    with pytest.raises(OSError, match="broken"):
        weights.wait_for(3 * PAGE)
    assert not weights.num_arriving
    assert weights.num_mapped_pages * PAGE == weights.loaded_bytes < 3 * PAGE
    weights.load()
    assert read(weights.address, 12 * PAGE) == data


def test_a_model_may_start_when_its_first_bytes_are_there_and_the_others_arrive(rig: Rig) -> None:
    weights, _, gate = held_load(rig, 12)
    weights.start_bytes = 4 * PAGE
    assert not weights.can_start
    gate.allow(4)
    weights.wait_for(weights.start_bytes)
    assert weights.can_start
    assert not weights.is_resident
    gate.allow()
    weights.stop()
    weights.evict(1)
    assert not weights.can_start  # a page is missing


def test_without_an_early_start_a_model_starts_when_all_is_there(rig: Rig) -> None:
    weights, _ = rig.weights(12, "w")
    assert weights.start_bytes == 12 * PAGE
    weights.load(11)
    assert not weights.can_start
    weights.load()
    assert weights.can_start
    slots, _ = rig.weights(6, "slots", num_own_pages=4)
    with pytest.raises(AssertionError):
        slots.start_bytes = PAGE


@pytest.mark.parametrize(
    ("device", "snapshot", "is_far"), [(0, 0, False), (0, 1, True), (NO_NODE, 1, False)]
)
def test_a_snapshot_on_another_node_is_far(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, device: int, snapshot: int, is_far: bool
) -> None:
    monkeypatch.setattr(rig.device, "rank_nodes", (device,))
    monkeypatch.setattr(weights_module, "most_used_node", lambda address, num_bytes: snapshot)
    weights, _ = rig.weights(2, "w")
    assert weights.is_far is is_far
