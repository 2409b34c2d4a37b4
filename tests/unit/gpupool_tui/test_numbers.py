"""Short forms of numbers."""

from __future__ import annotations

from datetime import UTC

import pytest

from gpupool_tui.text import clock, count, duration, percent, ranges, size, uptime


def test_durations() -> None:
    assert [duration(s) for s in (None, 0.34, 12.0, -1.0)] == ["-", "340ms", "12s", "0us"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0"),
        (-5, "0"),
        (512, "512B"),
        (14.2 * 2**30, "14.2G"),
        (1000, "0.977K"),
        (999 << 30, "999G"),
        (4000 << 40, "4000T"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7.25, "7.2"), (9999, "9999"), (12_400, "12.4k"), (3.1e6, "3.1M"), (5e9, "5G")],
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "-"), (1.0, "100"), (0.99999, "99.9"), (0.975, "97.5"), (0.0, "0.0")]
)
def test_only_all_in_time_is_100_percent(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45s"), (720, "12m"), (11_100, "3h 05m"), (9.2 * 86400, "9d 4h")]
)
def test_uptimes(seconds: float, text: str) -> None:
    assert uptime(seconds) == text


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2,5"
    assert ranges([3]) == "3"
    assert ranges([]) == ""


def test_clock() -> None:
    assert clock(1_750_000_000, UTC) == "15:06:40"
