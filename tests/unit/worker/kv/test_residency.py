"""Who is brought in beside whom, and what gives way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpupoold.memory import kv_extents as kv_module
from gpupoold.memory.device import Device, Direction
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.transfers import TransferQueue
from gpupoold.scheduling import eviction
from gpupoold.scheduling.eviction import Eviction, PageHolding
from gpupoold.worker.kv import page_eviction, residency
from gpupoold.worker.kv.page_eviction import Use
from tests.unit.memory.rig import PAGE, GatedCopyStream
from tests.unit.worker.kv.residency_box import WEIGHT_PAGES, Box, Prefixes


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box(60)
    yield made
    made.close()


@pytest.fixture
def tight_box() -> Iterator[Box]:
    """Room for one model and a half."""
    made = Box(34)
    yield made
    made.close()


def test_the_next_model_is_there_when_its_turn_comes(box: Box) -> None:
    assert box.switch_in("a") == WEIGHT_PAGES
    assert box.residency.prefetched_bytes == 0
    box.residency.prefetch("b", "a")
    assert box.residency.missing_bytes("b") == 0
    assert box.residency.prefetched_bytes == WEIGHT_PAGES * box.rig.device.page_bytes
    assert box.switch_in("b") == 0
    assert box.residency.prefetched_bytes == 0
    assert box.switch_in("a") == 0
    box.residency.prefetch("b", "a")
    assert box.residency.prefetched_bytes == 0  # it has been there since its turn


def test_the_model_that_runs_waits_for_the_mapping_of_a_part_at_a_time(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_eviction, "_PIECE_BYTES", 7 * PAGE)
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    there = [box.weights("b").num_mapped_pages]
    while there[-1] < WEIGHT_PAGES:
        box.weights("b").wait()
        box.residency.advance("a")
        there.append(box.weights("b").num_mapped_pages)
    assert there == [*range(7, WEIGHT_PAGES, 7), WEIGHT_PAGES]
    assert box.switch_in("b") == 0


def test_as_much_comes_in_as_there_is_room_for(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    # 34 pages less the model, both null blocks' extents, and an extent to grow by.
    extent = sum(len(span) for span in box.models["a"].kv.geometry.pages(0))
    there = box.weights("b").num_mapped_pages
    assert there == 34 - WEIGHT_PAGES - 3 * extent
    assert box.switch_in("b") == WEIGHT_PAGES - there


def test_only_as_much_goes_as_must(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    assert box.switch_in("b") == WEIGHT_PAGES
    left = box.weights("a").num_mapped_pages
    assert 0 < left < WEIGHT_PAGES
    assert box.switch_in("a") == WEIGHT_PAGES - left


def test_idle_models_make_room_and_the_current_one_does_not(box: Box) -> None:
    box.switch_in("c")
    box.switch_in("b")
    box.switch_in("a")
    assert box.weights("c").is_resident
    short = WEIGHT_PAGES - box.weights("b").num_mapped_pages
    assert short > 0, "the least recently used gave way"
    box.residency.prefetch("b", "a")
    assert box.weights("a").is_resident
    assert box.weights("c").num_mapped_pages < WEIGHT_PAGES
    assert box.switch_in("b") == 0


def test_a_prefetch_that_fits_beside_the_current_model_is_whole(box: Box) -> None:
    """The switch would rather evict a, which is due last; but then the copy would delay b."""
    box.switch_in("c")
    box.ask("c", 1)
    box.switch_in("a")
    box.ask("a", 1)
    box.uses["c"] = Use(1, 0.0, 10.0, 1.0)
    box.uses["a"] = Use(1, 0.0, 10.0, 99.0)
    box.residency.prefetch("b", "a")
    assert box.weights("a").is_resident
    assert not box.weights("c").is_resident
    assert box.switch_in("b") == 0


def test_plans_change(box: Box) -> None:
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.residency.prefetch("c", "a")
    assert not box.weights("b").num_arriving
    assert box.switch_in("c") == 0
    box.switch_in("b")


def test_what_is_being_prefetched_gives_way_to_the_current_model(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.models["a"].num_wanted = box.models["a"].kv.geometry.num_blocks - 1
    box.residency.ensure_kv("a")
    assert box.models["a"].num_missing_blocks() == (8, 0)
    assert box.rig.pool.num_free < 3
    box.residency.check_integrity()
    box.models["a"].num_wanted = 0
    box.switch_in("b")


def test_a_model_that_goes_is_prefetched_no_more(box: Box) -> None:
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    box.residency.remove("b")
    assert not box.weights("b").num_arriving
    box.weights("b").evict()
    box.models["b"].kv.unmap([0])
    box.residency.check_integrity()
    box.residency.prefetch("c", "a")
    assert box.switch_in("c") == 0


def test_a_running_model_that_is_paged_out_waits_for_its_own_kernels_only(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment of its last kernels is recorded before its pages go, as when another runs."""
    box.switch_in("a")
    weights, moments = box.weights("a"), list[object]()
    evict = weights.evict

    def note_and_evict() -> None:
        moments.append(weights.address_range.last_use)
        evict()

    monkeypatch.setattr(weights, "evict", note_and_evict)
    box.residency.page_out("a")
    assert moments
    assert None not in moments


def test_kv_leaves_for_a_switch_and_comes_back(tight_box: Box) -> None:
    box = tight_box
    box.switch_in("a")
    written = box.ask("a", 3)
    box.switch_in("b")
    more = box.ask("b", 3)  # a's weights alone do not make the room
    assert box.models["a"].kv.index.extents(Place.LEAVING) + box.models["a"].kv.index.extents(
        Place.HOST
    )
    box.residency.check_integrity()
    box.switch_in("a")
    assert box.models["a"].is_ready()
    assert box.kv_bytes("a", written) == written
    box.switch_in("b")
    box.residency.bring_all("b")
    assert box.kv_bytes("b", more) == more
    box.residency.check_integrity()


def test_a_model_runs_as_soon_as_its_first_request_can(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_module, "_GROUP_BYTES", PAGE)  # every extent is a transfer of its own
    box.switch_in("a")
    first, second = box.ask("a", 3), box.ask("a", 3)
    box.residency.page_out("a")
    assert box.residency.missing_bytes("a") == (WEIGHT_PAGES + 6 * 3) * PAGE
    model = box.models["a"]
    gate = GatedCopyStream(box.rig.device.open_copy_stream(Direction.IN))
    gate.allow(3 + 1)  # extent 0 with the null block, and the first request's
    box.residency._in.close()
    box.residency._in = TransferQueue([gate], "copy-in")
    box.residency.switch_in("a")
    assert model.kv.is_on_device(first)
    assert not model.kv.is_on_device(second)
    assert box.residency.missing_bytes("a") == 0  # all of it is on its way
    assert box.kv_bytes("a", first) == first
    gate.allow()
    box.residency.bring_all("a")
    assert box.kv_bytes("a", second) == second


def test_what_others_hold_leaves_during_the_turn_before(box: Box) -> None:
    """b is next; a runs; c, which is due last, gives its KV up meanwhile."""
    box.uses["c"] = Use(1, 0.0, 10.0, 99.0)
    box.switch_in("c")
    written = box.ask("c", 7)
    box.switch_in("a")
    box.uses["a"] = Use(1, 0.0, 10.0, 1.0)
    box.ask("a", 1)
    box.residency.prefetch("b", "a")
    for _ in range(100):
        box.residency.advance("a")
        if not box.residency.missing_bytes("b"):
            break
        time.sleep(0.01)
    assert box.weights("a").is_resident
    assert box.models["a"].is_ready()
    assert box.switch_in("b") == 0
    box.switch_in("c")
    box.residency.bring_all("c")
    assert box.kv_bytes("c", written) == written


def test_paused_kv_is_prefetched_too(box: Box) -> None:
    box.switch_in("b")
    written = box.ask("b", 3)
    box.residency.page_out("b")
    box.switch_in("a")
    box.residency.prefetch("b", "a")
    for _ in range(100):
        box.residency.advance("a")
        if not box.residency.missing_bytes("b") and box.models["b"].kv.is_whole:
            break
        time.sleep(0.01)
    box.weights("b").wait()
    stages = box.residency.switch_in("b")
    assert stages is not None
    assert (stages.moved_bytes, stages.prefetched_bytes) == (0, box.weights("b").num_bytes)
    assert box.kv_bytes("b", written) == written


def test_a_full_host_makes_requests_start_anew_at_the_very_last(tight_box: Box) -> None:
    box = Box(34, host_pages=0)
    box.switch_in("a")
    box.ask("a", 3)
    box.switch_in("b")
    assert box.models["a"].num_preempted == 0, "dropping weights made the room"
    box.ask("b", 3)
    assert box.models["a"].num_preempted == 1
    assert box.residency.eviction.num_recomputed == 1
    assert box.models["a"].kv.resident_bytes == 0
    box.residency.check_integrity()
    box.close()


def test_a_switch_counts_the_kv_that_came_in_it(box: Box) -> None:
    """Not what comes later, between steps."""
    box.switch_in("a")
    first, second = box.ask("a", 2), box.ask("a", 3)
    page_bytes = 3 * PAGE  # of a block
    box.residency.page_out("a")
    assert box.models["a"].kv.missing_bytes == 5 * page_bytes
    before = box.models["a"].kv.arrived_bytes
    stages = box.residency.switch_in("a")
    assert stages is not None
    arrived = box.models["a"].kv.arrived_bytes - before
    assert stages.kv_in_bytes == arrived
    box.residency.bring_all("a")
    assert box.models["a"].kv.arrived_bytes - before == 5 * page_bytes
    assert box.kv_bytes("a", first) == first
    assert box.kv_bytes("a", second) == second


def test_kv_that_waits_behind_the_first_request_is_not_of_the_switch(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.switch_in("a")
    box.ask("a", 2)
    box.ask("a", 3)
    box.residency.page_out("a")
    missing = box.models["a"].kv.missing_bytes
    monkeypatch.setattr(residency.Residency, "wait_ready", lambda *_: None)  # ready at once
    stages = box.residency.switch_in("a")
    assert stages is not None
    assert stages.kv_in_bytes == 0
    assert box.models["a"].kv.missing_bytes == missing


def test_switches_tell_what_bandwidth_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moving average, which begins with what was measured at the start."""
    seconds = iter(float(second) for second in range(1_000))
    box = Box(60, clock=lambda: next(seconds))
    monkeypatch.setattr(Device, "piece_bytes", 1)
    assert box.residency.loads.bandwidth_bytes_per_s == 1e9
    box.switch_in("a")
    assert 0.79e9 < box.residency.loads.bandwidth_bytes_per_s < 0.81e9  # a fifth of next to nothing
    box.switch_in("a")
    assert 0.79e9 < box.residency.loads.bandwidth_bytes_per_s < 0.81e9  # nothing moved
    box.close()


def test_a_load_from_another_node_says_nothing_about_the_bandwidth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter(float(second) for second in range(1_000))
    box = Box(60, clock=lambda: next(seconds))
    monkeypatch.setattr(Device, "piece_bytes", 1)
    box.models["a"].weights.is_far = True
    box.switch_in("a")
    assert box.residency.loads.bandwidth_bytes_per_s == 1e9
    box.close()


def test_a_small_load_says_little_about_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(float(second) for second in range(1_000))
    box = Box(60, clock=lambda: next(seconds))
    num_bytes = box.models["a"].weights.num_bytes
    monkeypatch.setattr(Device, "piece_bytes", 50 * num_bytes)
    box.switch_in("a")
    assert 0.997e9 < box.residency.loads.bandwidth_bytes_per_s < 0.999e9  # a hundredth of a fifth
    box.close()


class TestWithoutRoom:
    """A model that wants more KV than the device can give."""

    @pytest.fixture
    def plans(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The pages that each plan of eviction was for."""
        made: list[int] = []
        plan = eviction.plan_evictions

        def counted(num_pages: int, holdings: list[PageHolding]) -> list[Eviction]:
            made.append(num_pages)
            return plan(num_pages, holdings)

        monkeypatch.setattr(page_eviction, "plan_evictions", counted)
        return made

    def test_nothing_is_planned_until_something_changes(
        self, tight_box: Box, plans: list[int]
    ) -> None:
        tight_box.switch_in("a")
        model = tight_box.models["a"]
        model.num_wanted = model.kv.geometry.num_blocks
        for _ in range(3):
            tight_box.residency.ensure_kv("a")
        assert tight_box.rig.pool.num_free < model.kv.geometry.extent_pages
        plans.clear()
        for _ in range(5):
            tight_box.residency.ensure_kv("a")
        assert plans == []
        model.kv.unmap(model.kv.index.idle()[:1])
        tight_box.residency.ensure_kv("a")
        assert plans
        tight_box.residency.ensure_kv("a")
        plans.clear()
        tight_box.residency.ensure_kv("a")
        assert plans == []
        tight_box.residency.check_integrity()

    def test_a_change_of_another_models_kv_is_one(self, box: Box, plans: list[int]) -> None:
        box.switch_in("b")
        box.ask("b", 4)
        box.switch_in("a")
        model = box.models["a"]
        model.num_wanted = model.kv.geometry.num_blocks
        evicting = box.residency.eviction
        for _ in range(3):
            evicting.try_to_free(1000, {"a", "b"})
        plans.clear()
        evicting.try_to_free(1000, {"a", "b"})
        assert plans == []
        evicting.try_to_free(1000, {"a"})  # b is no longer kept
        assert plans


def test_only_models_with_copies_are_settled(tight_box: Box) -> None:
    tight_box.switch_in("a")
    tight_box.ask("a", 3)
    busy = tight_box.residency.eviction._busy
    assert not busy
    tight_box.switch_in("b")
    tight_box.ask("b", 3)
    while busy:
        tight_box.residency.advance("b")
    assert tight_box.models["a"].kv.host_bytes
    tight_box.residency.check_integrity()


@pytest.fixture
def full() -> Iterator[Box]:
    """A device that the weights and two requests of ``a`` fill; one of the two has not begun."""
    made = Box(48)
    made.switch_in("a")
    model = made.models["a"]
    made.ask("a", 4)
    made.ask("a", 4)
    model.prefixes = Prefixes(model, model.requests.pop())
    yield made
    made.close()


def test_running_requests_take_the_memory_of_prefixes(full: Box) -> None:
    model = full.models["a"]
    assert model.prefixes is not None
    model.num_wanted = 3
    full.residency.ensure_kv("a")
    full.residency.ensure_kv("a")
    assert model.prefixes.found, "waiting requests wanted the blocks"
    model.prefixes.is_short = True
    full.residency.ensure_kv("a")
    assert not model.prefixes.found
    assert model.ledger.num_free >= 3
    assert model.num_preempted == 0
    full.residency.check_integrity()


def test_prefixes_are_given_up_before_kv_is_computed_anew(full: Box) -> None:
    model: Any = full.models["a"]
    full.residency.eviction.give_up(model)
    assert full.residency.eviction.num_recomputed == 0
    assert model.num_preempted == 0
    full.residency.eviction.give_up(model)
    assert full.residency.eviction.num_recomputed == 1
    assert model.num_preempted == 1
    full.residency.check_integrity()
