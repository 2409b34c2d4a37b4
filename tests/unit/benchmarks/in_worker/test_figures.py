"""Figures beside their limits."""

from __future__ import annotations

import pytest

from benchmarks.in_worker import figures


def test_percentiles_are_of_all_samples() -> None:
    samples = [0.001] * 98 + [5.0, 7.0]
    assert figures.times(samples) == {"p50_s": 0.001, "p99_s": 5.0, "samples": 100}
    with pytest.raises(ValueError, match="no samples"):
        figures.p50([])


def test_bandwidth_is_that_of_the_median() -> None:
    assert figures.bandwidth(100, [1.0, 2.0, 50.0]) == 50.0


def test_a_duration_is_reached_up_to_its_limit() -> None:
    assert figures.at_most(2.0, 2.0, "p99_s") == {
        "limit_s": 2.0,
        "limit_of": "p99_s",
        "ratio": 1.0,
        "reached": True,
    }
    assert figures.at_most(3.0, 2.0, "p50_s")["reached"] is False


def test_a_rate_is_reached_from_its_limit_on() -> None:
    assert figures.at_least(8.0, 8.0, "bytes_per_s") == {
        "limit_bytes_per_s": 8.0,
        "ratio": 1.0,
        "reached": True,
    }
    assert figures.at_least(6.0, 8.0, "bytes_per_s")["reached"] is False


def test_a_host_cached_switch_may_take_its_copies_at_their_shares_and_10_ms() -> None:
    limit_s = figures.host_cached_limit_s(500_000_000, 80_000_000, 10e9, 8e9)
    assert limit_s == pytest.approx(0.05 / 0.9 + 0.01 / 0.8 + 0.01)


@pytest.mark.parametrize(
    ("extra_s", "share"), [(0.0, 1.0), (-0.1, 1.0), (0.5, 0.5), (1.0, 0.0), (2.0, -1.0)]
)
def test_what_steps_did_not_wait_for_was_hidden(extra_s: float, share: float) -> None:
    assert figures.hidden_share(extra_s, alone_s=1.0) == share
