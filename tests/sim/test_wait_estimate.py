"""What refused clients are told, and what then happened (docs/internals/request-life.md)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wait_estimate import measure, scenario_of


def measured(box: str, num_models: int, rps: float, bound: int) -> dict[str, Any]:
    return measure(scenario_of(box, num_models, rps, duration_s=60.0), bound)


def test_light_load_waits_for_nothing_but_its_prefill() -> None:
    first = measured("1xH800", 1, 4.0, 1000)["first_token"]
    assert first["n"] > 200
    assert first["error_p90_s"] <= 0.2 * first["fact_p90_s"]


@pytest.mark.parametrize(("num_models", "rps"), [(1, 40.0), (4, 4.0)])
def test_full_queue_says_when_there_is_room(num_models: int, rps: float) -> None:
    """Four times what the device can do: most are refused, and told when to come."""
    row = measured("1xH800", num_models, rps, 64)
    assert row["refused"] > 0.5 * row["requests"]
    first, one, quarter = row["first_token"], row["drain_one"], row["drain_quarter"]
    assert first["error_p50_s"] <= 0.25 * first["fact_p50_s"]
    # The next end is a matter of luck; sixteen ends are not.
    assert one["error_p50_s"] <= one["fact_p50_s"]
    assert quarter["error_p50_s"] <= 0.5 * quarter["fact_p50_s"]
    assert abs(quarter["bias_p50_s"]) <= 0.4 * quarter["fact_p50_s"]
