"""Weights without an engine: they stay while nobody needs the memory, and are mapped again."""

from __future__ import annotations

import pytest

from gpupoold.memory.pages import OutOfPages, PagePool, PageRun, WeightsId
from tests.unit.memory.rig import PAGE, Rig, read, write

A, B = WeightsId("a", (0, 1)), WeightsId("b", (0, 2))


def unbound(pool: PagePool) -> dict[str, int]:
    pool.check_integrity()
    return {owner.model: num_pages for owner, num_pages in pool.num_unbound().items()}


@pytest.fixture
def pool() -> PagePool:
    """12 free pages: 4 of a, then 4 of b, then 4 without contents."""
    made = PagePool(12)
    made.allocate(12)
    made.unbind(A, [PageRun(2, 2), PageRun(0, 2)])
    made.unbind(B, [PageRun(4, 4)])
    made.free([PageRun(8, 4)])
    return made


def test_they_count_as_free(pool: PagePool) -> None:
    assert (pool.num_free, unbound(pool)) == (12, {"a": 4, "b": 4})
    pool.check_owned([])
    with pytest.raises(OutOfPages):
        pool.allocate(13)
    assert unbound(pool) == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("num_pages", "left"),
    [
        (4, {"a": 4, "b": 4}),
        (5, {"a": 3, "b": 4}),
        (8, {"b": 4}),
        (9, {"b": 3}),
        (12, {}),
    ],
)
def test_those_that_left_first_give_way_first_from_their_end(
    pool: PagePool, num_pages: int, left: dict[str, int]
) -> None:
    runs = pool.allocate(num_pages)
    assert sum(run.num_pages for run in runs) == num_pages
    assert (pool.num_free, unbound(pool)) == (12 - num_pages, left)
    if left.get("a") == 3:
        assert pool.bind(A, 0, 9) == [PageRun(2, 2), PageRun(0, 1)]


def test_pages_come_back_in_their_order_piece_by_piece(pool: PagePool) -> None:
    assert pool.bind(A, 0, 3) == [PageRun(2, 2), PageRun(0, 1)]
    assert (pool.num_free, unbound(pool)) == (9, {"a": 1, "b": 4})
    assert pool.bind(A, 3, 3) == [PageRun(1, 1)]
    assert pool.bind(A, 4, 3) == []
    pool.check_owned([0, 1, 2, 3])


def test_pages_behind_a_gap_are_of_no_use(pool: PagePool) -> None:
    """Some of the first have been copied meanwhile."""
    assert pool.bind(A, 1, 3) == []
    assert (pool.num_free, unbound(pool)) == (12, {"b": 4})


def test_an_owner_has_its_latest_pages(pool: PagePool) -> None:
    [run] = pool.allocate(2)
    pool.unbind(A, [run])
    assert (pool.num_free, unbound(pool)) == (12, {"b": 4, "a": 2})
    pool.unbind(A, [])
    pool.forget(WeightsId("a", (9, 9)))
    pool.forget(B)
    assert (pool.num_free, unbound(pool)) == (12, {})
    assert pool.allocate(12) == [PageRun(0, 12)]


def test_nothing_is_copied(rig: Rig) -> None:
    """The snapshot has other bytes by then; another model has had the addresses' pages."""
    weights, data = rig.weights(10, "w")
    other, _ = rig.weights(20, "other")
    weights.load()
    weights.unbind(A)
    assert (weights.num_mapped_pages, weights.is_resident, rig.pool.num_free) == (0, False, 64)
    other.load()
    write(weights.snapshot.address, bytes(10 * PAGE))
    assert weights.bind(A, 4)
    assert weights.loaded_bytes == 4 * PAGE
    assert not weights.bind(A, 8)
    assert weights.is_resident
    assert read(weights.address, 10 * PAGE) == data
    assert (rig.pool.num_free, unbound(rig.pool)) == (64 - 30, {})
    weights.evict(3)
    write(weights.snapshot.address, data)
    assert weights.load() == 3 * PAGE


def test_what_others_needed_is_copied(rig: Rig) -> None:
    weights, data = rig.weights(20, "w")
    other, others_data = rig.weights(50, "other")
    weights.load()
    weights.unbind(A)
    other.load()
    assert unbound(rig.pool) == {"a": 14}
    assert not weights.bind(A, 20)
    other.evict()
    rig.soil()
    assert weights.load() == 6 * PAGE
    assert read(weights.address, 20 * PAGE) == data
    other.load(44)
    assert read(other.address, 44 * PAGE) == others_data[: 44 * PAGE]


def test_only_what_has_arrived_stays(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    weights.load(2)
    with rig.copies_held():
        weights.begin_load(rig.ins, 6)
        weights.address_range.check_integrity()
    weights.unbind(A)
    [(_, num_pages)] = rig.pool.num_unbound().items()
    assert 2 <= num_pages <= 8
    weights.bind(A, 10)
    assert weights.load() == (10 - num_pages) * PAGE
    assert read(weights.address, 10 * PAGE) == data


def test_a_device_that_cannot_map_has_given_the_pages_up(rig: Rig) -> None:
    weights, data = rig.weights(10, "w")
    weights.load()
    weights.unbind(A)
    assert weights.bind(A, 2)
    rig.device.fail_in = 1
    with pytest.raises(OSError, match="too many mappings"):
        weights.bind(A, 3)
    rig.device.fail_in = 0
    weights.address_range.check_integrity()
    assert not weights.bind(A, 3)
    assert (weights.num_mapped_pages, rig.pool.num_free, unbound(rig.pool)) == (2, 62, {})
    assert weights.load() == 8 * PAGE
    assert read(weights.address, 10 * PAGE) == data
