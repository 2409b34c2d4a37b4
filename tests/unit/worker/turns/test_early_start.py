"""What the check of a model's early starts takes away, and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from hypothesis import given, strategies as st

from gpupoold.memory.device import Direction
from gpupoold.memory.weights import WeightMemory
from gpupoold.worker.turns.self_check import MissingWeights, _windows
from gpupoold.worker.weights import tensors
from tests.unit.memory.rig import PAGE, Rig, read


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def missing_weights(rig: Rig, weights: WeightMemory, span: range) -> MissingWeights:
    def overwrite(span: range) -> None:
        tensors.spoil(rig.device, weights.address + span.start, len(span))

    stream = rig.device.open_copy_stream(Direction.IN)
    return MissingWeights(weights, stream, overwrite, span)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    start=st.integers(0, 100),
    limit_bytes=st.integers(1, 120),
)
def test_windows_cover_all_layers_and_are_as_long_as_may_be(
    sizes: list[int], start: int, limit_bytes: int
) -> None:
    ends = [start]
    for size in sizes:
        ends.append(ends[-1] + size)
    windows = list(_windows(ends, limit_bytes))
    assert all(windows)
    assert [one for window in windows for one in window] == list(range(start, ends[-1]))
    for window in windows:
        assert window.start in ends
        assert window.stop in ends
        num_layers = sum(window.start < end <= window.stop for end in set(ends))
        assert len(window) <= limit_bytes or num_layers == 1
    for window, following in pairwise(windows):
        next_end = min(end for end in ends if end > following.start)
        assert next_end - window.start > limit_bytes


def test_bytes_are_away_until_they_are_waited_for(rig: Rig) -> None:
    weights, data = rig.weights(12, "w")
    weights.load()
    span = range(3 * PAGE + 100, 9 * PAGE + 5)
    missing = missing_weights(rig, weights, span)
    with missing.removed():
        assert read(weights.address + span.start, len(span)) == b"\xff" * len(span)
        assert read(weights.address, span.start) == data[: span.start]
        assert read(weights.address + span.stop, 2 * PAGE) == data[span.stop :][: 2 * PAGE]
        missing.wait_for(PAGE)
        assert read(weights.address + span.start, 1) == b"\xff"
        missing.wait_for(5 * PAGE)
        assert read(weights.address, 5 * PAGE) == data[: 5 * PAGE]
        assert read(weights.address + 5 * PAGE, PAGE) == b"\xff" * PAGE
        missing.wait_for(4 * PAGE)
        missing.wait_for(12 * PAGE)
        assert read(weights.address, 12 * PAGE) == data


def test_an_error_in_between_leaves_nothing_away(rig: Rig) -> None:
    weights, data = rig.weights(12, "w")
    weights.load()
    missing = missing_weights(rig, weights, range(PAGE, 12 * PAGE))
    with pytest.raises(ZeroDivisionError), missing.removed():
        raise ZeroDivisionError
    assert read(weights.address, 12 * PAGE) == data
