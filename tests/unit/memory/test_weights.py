"""Weight memory: the image comes in whole, at the same address, or not at all."""

from __future__ import annotations

import pytest

from gpupoold.memory.contracts import OutOfPages
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.rig import PAGE, Rig, read


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


def test_no_room_changes_nothing(rig: Rig) -> None:
    (first, data), (second, _) = rig.weights(40, "a"), rig.weights(30, "b")
    first.load()
    with pytest.raises(OutOfPages):
        second.load()
    assert not second.is_resident
    assert rig.pool.num_free == 24
    assert read(first.address, len(data)) == data


def test_the_image_covers_the_region(rig: Rig) -> None:
    weights, _ = rig.weights(4, "a")
    with pytest.raises(AssertionError):
        WeightMemory(rig.region(5), rig.device, weights.image)
