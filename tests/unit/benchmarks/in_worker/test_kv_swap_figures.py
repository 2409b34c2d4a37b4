"""Rounds of KV are held against what the machine could do in the same round."""

from __future__ import annotations

import pytest

from benchmarks.in_worker.kv_swap import _swap_summary


def summary(slow: float) -> dict[str, object]:
    """Three rounds, the second on a machine that is ``slow`` times as slow."""
    paces = (1.0, slow, 1.0)
    return _swap_summary(
        8_000,
        outs_s=[0.6 * pace for pace in paces],
        ins_s=[0.4 * pace for pace in paces],
        maps_s=[0.1 * pace for pace in paces],
        plain_s={
            "device_copy": [0.5 * pace for pace in paces],
            "memcpy_one_thread": [0.75 * pace for pace in paces],
        },
    )


@pytest.mark.parametrize("slow", [1.0, 7.0])
def test_a_slow_round_slows_both_sides(slow: float) -> None:
    found = summary(slow)
    assert found["bytes_per_s"] == 8_000
    assert found["ratio"] == pytest.approx((0.75 + 0.1) / 1.0 / 0.8)
    assert found["reached"] is True
    assert found["ratio_to_device_copy"] == pytest.approx(0.6)


def test_a_limit_that_is_missed() -> None:
    found = _swap_summary(8_000, [0.6], [0.4], [0.0], {"device_copy": [0.7]})
    assert found["ratio"] == pytest.approx(0.7 / 0.8)
    assert found["reached"] is False
