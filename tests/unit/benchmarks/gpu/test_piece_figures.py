"""What pieces make of their measurements: each figure with its limit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.decode_layouts import layout_figures
from benchmarks.gpu.mixed import Phase, mixed_figures, phases_of, simulated_figures
from benchmarks.gpu.overhead import overhead_figures
from benchmarks.gpu.sleep import sleep_figures
from benchmarks.gpu.streams import stream_figures
from benchmarks.gpu.switch import kv_figures, switch_figures
from gpupoold.sim.workloads import SimRequest


def reached(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figure["reached"] for name, figure in figures.items()}


def row(**changes: Any) -> dict[str, Any]:
    usual = {"p50_s": 0.4, "p99_s": 0.5, "bytes": 16e9, "kv_bytes": 0, "memcpy_p50_s": 0.32}
    return usual | changes


class TestSwitches:
    def test_one_from_host_memory_is_held_against_the_copies_beside_it(self) -> None:
        found = switch_figures("8B", {"host_cached": {"without_kv": row()}})
        switch = found["8B_host_cached_switch_p50_s"]
        assert switch["limit"] == pytest.approx(0.32 / 0.9 + 0.1)
        assert switch["reached"] is True
        assert found["8B_weights_copy_bytes_per_s"]["measured"] == pytest.approx(50e9)

    def test_kv_may_take_a_little_longer_than_weights(self) -> None:
        with_kv = row(kv_bytes=4e9, p50_s=0.47)
        found = switch_figures("8B", {"host_cached": {"with_kv": with_kv}})
        switch = found["8B_host_cached_switch_with_kv_p50_s"]
        assert switch["limit"] == pytest.approx(12 / 45 + 4 / 40 + 0.1)
        assert switch["reached"] is False

    def test_the_others_have_limits_of_their_own(self) -> None:
        late = row(p50_s=0.051, p99_s=0.0051)
        modes = {"prefetched": {"without_kv": late}, "resident": {"without_kv": late}}
        found = switch_figures("8B", modes)
        assert reached(found) == {
            "8B_prefetched_switch_p50_s": False,
            "8B_resident_switch_p99_s": False,
        }
        assert [figure["limit"] for figure in found.values()] == [0.05, 0.005]


def test_kv_is_held_against_plain_copies_and_must_be_the_same_after_it() -> None:
    swap = {"bytes_per_s": 41e9, "memcpy_bytes_per_s": {"device_copy": 50e9}, "is_intact": False}
    found = kv_figures("1B", {"kv_swap": swap, "kv_overlap": {"hidden_share": 0.6}})
    assert reached(found) == {
        "1B_kv_swap_bytes_per_s": True,
        "1B_kv_swap_differing_digests": False,
        "1B_kv_hidden_share": True,
    }


@pytest.mark.parametrize("device_bytes", [None, 0, 3 << 20])
def test_streams_may_lose_no_token_and_keep_nothing(device_bytes: int | None) -> None:
    streamed = {
        "switches": 999,
        "differing_tokens": 1,
        "tokens": 5000,
        "pages_leaked": 0,
        "host_bytes_gained": 1 << 20,
        "device_bytes_gained": device_bytes,
    }
    found = reached(stream_figures(streamed, 1000))
    assert (found["switches"], found["switches_differing_tokens"]) == (False, False)
    assert (found["switches_pages_leaked"], found["switches_host_gained_bytes"]) == (True, True)
    expected = None if device_bytes is None else device_bytes == 0
    assert found.get("switches_device_gained_bytes") is expected


def test_the_ratio_to_vllm_alone_has_a_limit_and_the_rest_has_none() -> None:
    server = {"tokens_per_s": 100.0, "ttft_p50_s": 0.05}
    measured = {"tokens_per_s_ratio": 0.97, "ttft_p50_delta_s": 0.001}
    found = reached(overhead_figures("8B", measured | {"gpupool": server, "vllm": server}))
    assert found.pop("8B_decode_ratio") is False
    assert len(found) == 5
    assert set(found.values()) == {None}


def test_a_sleep_and_its_wake_up_belong_together() -> None:
    found = sleep_figures("8B", [1.0, 2.0, 3.0], [3.0, 1.0, 1.0])
    assert found["8B_sleep_p50_s"]["measured"] == 2.0
    assert found["8B_wake_p50_s"]["measured"] == 1.0
    assert found["8B_sleep_and_wake_p50_s"]["measured"] == 4.0


def test_layouts_are_compared_round_by_round() -> None:
    seconds = {"layers_outermost": [2.0, 4.0, 1.0], "blocks_outermost": [1.0, 4.0, 2.0]}
    found = layout_figures("8B", seconds, 100)
    assert found["8B_decode_layers_outermost_tokens_per_s"]["measured"] == 50.0
    assert found["8B_decode_blocks_outermost_tokens_per_s"]["measured"] == 50.0
    # Ratios of 2, 1 and a half: the median.
    assert found["8B_decode_blocks_over_layers_outermost_ratio"]["measured"] == 1.0


class TestMixed:
    @staticmethod
    def phases(*attainments: float) -> list[Phase]:
        return [
            Phase(2.0**number, 30.0 * number, 10, 100, attainment, 0, 0.1, 0.2, 0)
            for number, attainment in enumerate(attainments)
        ]

    def test_goodput_lies_where_too_many_tokens_are_late(self) -> None:
        found = mixed_figures("gpupool", self.phases(1.0, 0.95, 0.85))
        assert found["mixed_gpupool_attainment"]["measured"] == pytest.approx(2.8 / 3)
        assert found["mixed_gpupool_at_4_rps_attainment"]["measured"] == 0.85
        assert found["mixed_gpupool_goodput_rps"]["measured"] == pytest.approx(3.0)

    def test_phases_follow_each_other_in_the_trace(self) -> None:
        requests = [SimRequest(str(at), "a", float(at), 1, 1) for at in range(10)]
        slow, fast = phases_of(requests, (1.0, 3.0), 2.0)
        assert [one.id for one in slow] == ["0", "1"]
        assert [one.id for one in fast] == ["2", "3", "4", "5", "6", "7"]
        assert [one.arrival_s for one in fast] == pytest.approx([n / 3 for n in range(6)])

    def test_the_simulator_is_compared_phase_by_phase(self) -> None:
        found = simulated_figures("gpupool", self.phases(1.0, 0.9), [0.99, 0.95])
        figure = found["mixed_gpupool_simulated_difference"]
        assert figure["measured"] == pytest.approx(0.05)
        assert figure["reached"] is False

    def test_or_is_bounded_by_what_was_tried(self) -> None:
        above = mixed_figures("gpupool", self.phases(1.0, 0.95))
        assert above["mixed_gpupool_goodput_at_least_rps"]["measured"] == 2.0
        below = mixed_figures("gpupool", self.phases(0.5))
        assert below["mixed_gpupool_goodput_at_most_rps"]["measured"] == 1.0
