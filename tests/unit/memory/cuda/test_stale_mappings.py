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
    ("address", "num_bytes", "expected"),
    [
        (39, 1, [(0, 40)]),
        (40, 20, []),
        (30, 31, [(0, 40), (60, 10)]),
        (70, 30, []),
        (0, 200, [(100, 20), (0, 40), (60, 10)]),
    ],
)
def test_whatever_overlaps_goes_as_a_whole(
    stale: StaleMappings,
    removed: list[tuple[int, int]],
    address: int,
    num_bytes: int,
    expected: list[tuple[int, int]],
) -> None:
    stale.remove_at(address, num_bytes)
    assert removed == expected
    assert stale.num_bytes == 70 - sum(size for _, size in expected)
