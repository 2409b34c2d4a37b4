"""Switches that end before all weights are present."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpupoold.memory.device import Device
from gpupoold.worker.kv import page_eviction
from tests.unit.memory.rig import PAGE, GatedCopyStream, read
from tests.unit.worker.kv.residency_box import WEIGHT_PAGES, Box

START_PAGES = 6


class GatedBox(Box):
    """A device whose copies in pass a gate."""

    gate: GatedCopyStream


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedBox]:
    """A device for one model and a half. Models start with 6 of 20 pages; batches have 2 pages."""
    monkeypatch.setattr("gpupoold.memory.emulated.EmulatedDevice.copy_batch_bytes", 2 * PAGE)
    gates: list[GatedCopyStream] = []

    def gated(device: object, direction: object) -> list[GatedCopyStream]:
        gates.append(GatedCopyStream(device.open_copy_stream(direction)))  # type: ignore[attr-defined]
        return [gates[-1]]

    monkeypatch.setattr("gpupoold.memory.emulated.EmulatedDevice.open_copy_streams", gated)
    monkeypatch.setattr("gpupoold.memory.emulated.EmulatedDevice.has_link", True, raising=False)
    made = GatedBox(34)
    for model in made.models.values():
        model.weights.start_bytes = START_PAGES * PAGE
    made.gate = gates[-2]
    yield made
    gates[-2].allow()
    made.close()


def whole(box: Box, name: str) -> bool:
    model = box.models[name]
    return read(model.weights.address, len(model.snapshot)) == model.snapshot


def test_a_switch_ends_when_a_step_may_begin(box: GatedBox) -> None:
    box.gate.allow(5)
    record = box.residency.switch_in("a")
    weights = box.weights("a")
    assert record is not None
    assert record.weight_bytes == WEIGHT_PAGES * PAGE
    assert 10 * PAGE <= record.late_weight_bytes <= (WEIGHT_PAGES - START_PAGES) * PAGE
    assert not weights.is_resident
    assert box.residency.can_step("a")
    assert box.residency.missing_bytes("a") == 0
    box.residency.check_integrity()
    assert box.residency.switch_in("a") is None  # the turn begins again: nothing to do
    box.gate.allow()
    box.residency.bring_all("a")
    assert weights.is_resident
    assert whole(box, "a")
    box.residency.check_integrity()


def test_kv_that_is_away_is_waited_for_with_all_weights(box: GatedBox) -> None:
    box.gate.allow()
    box.residency.make_resident("a")
    written = box.ask("a", 2)
    box.residency.page_out("a")
    record = box.residency.switch_in("a")
    assert record is not None
    assert record.late_weight_bytes == 0
    assert record.kv_in_bytes > 0
    assert box.weights("a").is_resident
    assert box.kv_bytes("a", written) == written


@pytest.mark.parametrize(
    "leave",
    [
        lambda box: box.residency.page_out("a"),
        lambda box: box.residency.switch_in("b"),
        lambda box: box.residency.free_pages(30),
        lambda box: box.weights("a").evict(),
    ],
    ids=["page out", "another model", "pages for a load", "evict"],
)
def test_weights_that_still_arrive_can_be_taken_away(
    box: GatedBox, leave: Callable[[GatedBox], object]
) -> None:
    box.gate.allow(5)
    box.residency.switch_in("a")
    box.gate.allow()
    leave(box)
    assert not box.residency.can_step("a")
    box.residency.check_integrity()
    box.residency.make_resident("a")
    assert whole(box, "a")


def test_the_rest_of_a_prefetch_arrives_during_the_step(box: GatedBox) -> None:
    box.gate.allow()
    box.residency.make_resident("a")
    box.gate.allow(2)
    box.residency.prefetch("b", "a")
    num_prefetched = box.weights("b").num_mapped_pages
    assert 0 < num_prefetched < WEIGHT_PAGES  # the other pages are a's
    box.gate.allow(6)
    record = box.residency.switch_in("b")
    assert record is not None
    assert record.prefetched_bytes == num_prefetched * PAGE
    assert record.weight_bytes == (WEIGHT_PAGES - num_prefetched) * PAGE
    assert record.late_weight_bytes > 0
    box.gate.allow()
    box.residency.bring_all("b")
    assert whole(box, "b")


def test_a_copy_that_fails_before_the_start_ends_the_switch(box: GatedBox) -> None:
    box.gate.error = OSError("the link is broken")
    with pytest.raises(OSError, match="broken"):
        box.residency.switch_in("a")
    assert not box.residency.can_step("a")
    box.residency.check_integrity()
    box.residency.make_resident("a")
    assert whole(box, "a")


def test_a_copy_that_fails_after_the_start_is_noticed_by_who_needs_it(box: GatedBox) -> None:
    box.gate.allow(5)
    box.residency.switch_in("a")
    box.gate.error = OSError("the link is broken")
    box.gate.allow()
    weights = box.weights("a")
    with pytest.raises(OSError, match="broken"):
        weights.wait_for(weights.num_bytes)
    assert not box.residency.can_step("a")
    assert not weights.is_resident
    box.residency.check_integrity()


def test_the_bandwidth_is_that_of_the_bytes_that_arrived(
    box: GatedBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_eviction, "_BANDWIDTH_SMOOTHING", 1.0)
    monkeypatch.setattr(Device, "piece_bytes", 1)
    box.gate.allow(5)
    record = box.residency.switch_in("a")
    assert record is not None
    arrived = record.weight_bytes - record.late_weight_bytes
    seconds = record.map_s + record.weights_s
    # The record counts the late bytes after the bandwidth: a copy may have ended in between.
    assert 0 < box.residency.loads.bandwidth_bytes_per_s <= 1.001 * arrived / seconds
    assert arrived < record.weight_bytes
    box.gate.allow()
