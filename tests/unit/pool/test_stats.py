"""Counts and latencies per model, totals over switches."""

from __future__ import annotations

import msgspec
import pytest

from gpupoold.domain import Targets
from gpupoold.pool import stats
from gpupoold.pool.requests import LiveRequest
from gpupoold.pool.stats import ModelStats, SwitchStats
from tests.unit.wire.samples import SWITCH


def request(*times_s: float) -> LiveRequest:
    live = LiveRequest("r", "m", 0, 0.0, Targets(1.0, 0.5), [])
    for at_s in times_s:
        live.add_tokens([1], at_s)
    return live


def test_nothing_yet() -> None:
    model = ModelStats()
    assert model.attainment is None
    assert set(model.latencies().values()) == {None}


def test_a_request_without_tokens_leaves_no_latency() -> None:
    model = ModelStats()
    model.end(request(), completed=False)
    assert (model.completed, model.tokens, model.attainment) == (0, 0, None)
    assert model.latencies()["ttft_p50_s"] is None


def test_ended_requests_add_up() -> None:
    model = ModelStats()
    model.end(request(0.5, 1.0, 1.75), completed=True)
    model.end(request(3.0), completed=False)
    assert (model.completed, model.tokens, model.tokens_in_time) == (1, 4, 3)
    assert model.attainment == 0.75
    assert model.latencies() == {
        "ttft_p50_s": 0.5,
        "ttft_p99_s": 3.0,
        "tbt_p50_s": 0.5,
        "tbt_p99_s": 0.75,
    }


def test_latencies_are_of_the_recent_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_NUM_TTFTS", 3)
    model = ModelStats()
    for ttft_s in (100.0, 0.5, 0.25, 0.125):
        model.end(request(ttft_s), completed=True)
    assert model.latencies()["ttft_p99_s"] == 0.5
    assert model.completed == 4


def test_switches_add_up() -> None:
    switches = SwitchStats()
    switches.add(SWITCH)
    switches.add(msgspec.structs.replace(SWITCH, total_s=1.0, weight_bytes=0))
    assert switches.count == 2
    assert switches.moved_bytes == (1 << 33) + 2 * 15
    assert switches.seconds == {
        "total": 1.75,
        "evict": 0.25,
        "map": 0.5,
        "weights": 0.5,
        "kv": 0.25,
    }
    assert SwitchStats().count == 0
