"""Limits, and figures that follow from others."""

from __future__ import annotations

import pytest

from benchmarks.gpu import figures


def test_a_switch_may_take_its_bytes_at_nine_tenths_and_a_tenth_of_a_second() -> None:
    limit_s = figures.host_cached_limit_s(16e9, 0, 50e9)
    assert limit_s == pytest.approx(16 / 45 + 0.1)
    assert figures.host_cached_limit_s(16e9, 1e9, 50e9) == pytest.approx(limit_s + 1 / 40)


def test_what_reaches_its_limit() -> None:
    assert figures.at_most(5, 5)["reached"] is True
    assert figures.at_most(6, 5)["reached"] is False
    assert figures.at_least(5, 5)["reached"] is True
    assert figures.at_least(4, 5)["reached"] is False
    assert figures.measured(4) == {"measured": 4, "limit": None, "reached": None}


class TestGoodput:
    def test_is_between_the_rates_where_attainment_falls_under_the_share(self) -> None:
        assert figures.goodput_rps({1.0: 1.0, 2.0: 0.95, 4.0: 0.85}) == pytest.approx(3.0)

    def test_the_order_of_the_rates_does_not_matter(self) -> None:
        assert figures.goodput_rps({4.0: 0.85, 1.0: 1.0, 2.0: 0.95}) == pytest.approx(3.0)

    @pytest.mark.parametrize("attainments", [{}, {1.0: 0.5}, {1.0: 1.0, 2.0: 0.9}])
    def test_is_unknown_where_it_never_falls_or_always_is_under(
        self, attainments: dict[float, float]
    ) -> None:
        assert figures.goodput_rps(attainments) is None


class TestDerived:
    def test_a_switch_is_held_against_the_rival_of_its_size(self) -> None:
        found = figures.derived(
            {
                "8B_host_cached_switch_p50_s": figures.measured(0.4),
                "8B_sleep_and_wake_p50_s": figures.measured(2.0),
                "1B_sleep_and_wake_p50_s": figures.measured(1.0),
            }
        )
        assert found.keys() == {"8B_sleep_and_wake_over_switch_ratio"}
        ratio = found["8B_sleep_and_wake_over_switch_ratio"]
        assert (ratio["measured"], ratio["limit"], ratio["reached"]) == (5.0, 3.0, True)

    def test_policies_are_compared_by_attainment_and_goodput(self) -> None:
        found = figures.derived(
            {
                "mixed_gpupool_attainment": figures.measured(1.0),
                "mixed_request-level_attainment": figures.measured(0.75),
                "mixed_gpupool_goodput_rps": figures.measured(6.0),
                "mixed_request-level_goodput_rps": figures.measured(4.0),
            }
        )
        difference = found["mixed_attainment_over_request-level_difference"]
        assert (difference["measured"], difference["reached"]) == (0.25, True)
        ratio = found["mixed_goodput_over_request-level_ratio"]
        assert (ratio["measured"], ratio["reached"]) == (1.5, False)

    def test_bounds_that_make_the_ratio_a_bound_itself_count(self) -> None:
        ours, theirs = figures.measured(8.0), figures.measured(2.0)
        name = "mixed_goodput_over_request-level_ratio"
        known = {
            "mixed_gpupool_goodput_at_least_rps": ours,
            "mixed_request-level_goodput_at_most_rps": theirs,
        }
        assert figures.derived(known)[name]["measured"] == 4.0
        other = {
            "mixed_gpupool_goodput_at_least_rps": ours,
            "mixed_request-level_goodput_at_least_rps": theirs,
        }
        assert name not in figures.derived(other)

    def test_of_one_policy_alone_nothing_follows(self) -> None:
        assert figures.derived({"mixed_gpupool_attainment": figures.measured(1.0)}) == {}
