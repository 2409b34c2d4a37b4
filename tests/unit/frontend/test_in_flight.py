"""Bytes of requests in flight, per key and in all."""

from __future__ import annotations

import contextlib

import pytest

from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.request_context import BodyHolding, BytesInFlight


def refused(holding: BodyHolding, num_bytes: int) -> int:
    """The status of the refusal of so many bytes more, 0 if they are given."""
    try:
        holding.add(num_bytes)
    except ApiError as error:
        return error.status
    return 0


def test_a_key_has_half() -> None:
    room = BytesInFlight(100)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(room.holding("k")) for _ in range(2))
        other = stack.enter_context(room.holding("other"))
        first.add(40)
        assert refused(second, 11) == 429
        assert refused(second, 10) == 0
        assert refused(other, 50) == 0
        assert refused(other, 1) == 413
        assert room.num_bytes == 100
    assert room.num_bytes == 0


def test_without_a_key_there_is_all() -> None:
    room = BytesInFlight(100)
    with room.holding("") as holding:
        assert refused(holding, 100) == 0
        with room.holding("k") as other:
            assert refused(other, 1) == 429
        assert refused(holding, 1) == 413
        assert holding.num_bytes == 100
    with room.holding("k") as other:
        assert refused(other, 50) == 0


def test_what_is_refused_takes_nothing() -> None:
    room = BytesInFlight(10)
    with pytest.raises(ApiError), room.holding("") as holding:
        holding.add(11)
    assert room.num_bytes == 0


def test_bounds_may_shrink() -> None:
    room = BytesInFlight(100)
    with room.holding("") as holding:
        holding.add(90)
        room.max_bytes = 50
        with room.holding("") as other:
            assert refused(other, 1) == 429
    assert room.num_bytes == 0
