"""Mappings that are left are removed once each, where and when they must be."""

from __future__ import annotations

import pytest

from gpupoold.memory.cuda.device import StaleMappings


@pytest.fixture
def removed() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def stale(removed: list[tuple[int, int]]) -> StaleMappings:
    kept = StaleMappings(lambda address, num_bytes: removed.append((address, num_bytes)))
    for address, num_bytes in ((100, 20), (0, 40), (60, 10)):
        kept.add(address, num_bytes)
    return kept


def test_the_oldest_go_first_and_in_parts(
    stale: StaleMappings, removed: list[tuple[int, int]]
) -> None:
    stale.remove_some(15)
    stale.remove_some(15)
    assert removed == [(100, 15), (115, 5), (0, 10)]
    assert stale.num_bytes == 40
    stale.remove_all()
    assert removed[3:] == [(10, 30), (60, 10)]
    assert stale.num_bytes == 0
    stale.remove_all()
    assert len(removed) == 5


@pytest.mark.parametrize(
    ("address", "num_bytes", "expected", "left"),
    [
        (39, 1, [(39, 1)], [(100, 20), (0, 39), (60, 10)]),
        (40, 20, [], [(100, 20), (0, 40), (60, 10)]),
        (30, 31, [(30, 10), (60, 1)], [(100, 20), (0, 30), (61, 9)]),
        (105, 5, [(105, 5)], [(100, 5), (110, 10), (0, 40), (60, 10)]),
        (0, 200, [(100, 20), (0, 40), (60, 10)], []),
    ],
)
def test_the_part_in_a_range_goes(
    stale: StaleMappings,
    removed: list[tuple[int, int]],
    address: int,
    num_bytes: int,
    expected: list[tuple[int, int]],
    left: list[tuple[int, int]],
) -> None:
    stale.remove_at(address, num_bytes)
    assert removed == expected
    stale.remove_all()
    assert removed[len(expected) :] == left
