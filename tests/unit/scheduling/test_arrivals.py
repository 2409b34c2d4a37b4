"""Rates and lengths of recent arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpupoold.scheduling import events as e
from gpupoold.scheduling.observed import ArrivalWindow, RequestClass
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from tests.unit.scheduling.driver import Driver

KIND = RequestClass(1000, 100)


def test_the_window_has_rates_by_model_and_class() -> None:
    window = ArrivalWindow(10.0)
    assert window.rates_rps(0.0) == {}
    assert window.seen_s(5.0) == 0.0
    for at_s in range(40):
        window.add("a", at_s / 2, 1000, 100 + at_s % 2 * 50)
        window.add("b", at_s / 2 + 0.25, 10, 0)
    assert window.seen_s(20.0) == 10.0
    assert window.rates_rps(20.0) == {
        "a": {RequestClass(1000, 126): pytest.approx(2.0, rel=0.05)},
        "b": {RequestClass(10, 1): pytest.approx(2.0, rel=0.05)},
    }
    assert window.models(20.0) == ["a", "b"]
    assert window.rates_rps(100.0) == {}


def test_a_young_window_counts_the_time_it_has_seen() -> None:
    window = ArrivalWindow(30.0)
    for at_s in (0.0, 2.0, 4.0):
        window.add("a", at_s, 1000, 100)
    assert window.rates_rps(5.0) == {"a": {KIND: pytest.approx(3 / 5)}}


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.floats(0.0, 20.0))
def test_rates_count_what_came_within_the_window(gaps_s: list[float], later_s: float) -> None:
    """The window ends a sixtieth earlier at most."""
    window, now_s, times = ArrivalWindow(10.0), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        times.append(now_s)
        window.add("a", now_s, 1000, 100)
    now_s += later_s
    seen_s = max(window.seen_s(now_s), 1.0)
    least = sum(at_s > now_s - 10.0 * 59 / 60 for at_s in times)
    most = sum(at_s >= now_s - 10.0 for at_s in times)
    rate_rps = window.rates_rps(now_s).get("a", {}).get(KIND, 0.0)
    assert least / seen_s - 1e-9 <= rate_rps <= most / seen_s * 60 / 59 + 1e-9


def test_the_memory_of_a_window_does_not_grow_with_the_rate() -> None:
    window = ArrivalWindow(10.0)
    for number in range(20_000):
        window.add("a", number / 1000, 1000, 100)
    assert len(window._buckets) <= 61
    assert window.rates_rps(20.0)["a"][KIND] == pytest.approx(1000.0, rel=0.02)


def test_a_request_that_lost_its_device_counts_again() -> None:
    """Its prompt has to be prefilled again."""
    box = Driver(GpupoolPolicy(), "a", num_devices=2)
    box.arrive("a", "r", at_s=1.0)
    device = box.state.requests["r"].device
    assert device is not None
    box.send(e.DeviceDown(device), at_s=2.0)
    [rate_rps] = box.state.arrivals.recent.rates_rps(3.0)["a"].values()
    assert rate_rps == pytest.approx(2 / 2)
