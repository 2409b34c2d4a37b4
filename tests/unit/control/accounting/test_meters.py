"""What is counted for the metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpupoold.control.accounting.meters import DeviceMeter, Meters
from gpupoold.wire import messages as m
from tests.unit.wire.samples import SWITCH


def switch(**changes: Any) -> m.SwitchRecord:
    return replace(SWITCH, **changes)


def ended(model: str, began_s: float | None = 1.0, turn_id: int = 1) -> m.TurnReport:
    return m.TurnReport(turn_id, model, began_s, 1.25, {})


class TestSwitches:
    @pytest.mark.parametrize(
        ("weight_bytes", "prefetched_bytes", "kind"),
        [(0, 0, "resident"), (0, 5, "prefetched"), (5, 0, "host_cached"), (5, 5, "host_cached")],
    )
    def test_kind_is_where_the_weights_were(
        self, weight_bytes: int, prefetched_bytes: int, kind: str
    ) -> None:
        meter = DeviceMeter()
        record = switch(weight_bytes=weight_bytes, prefetched_bytes=prefetched_bytes)
        assert meter.switched(record) == kind
        assert meter.switches == {kind: 1}

    def test_first_switch_after_the_snapshot_was_read_is_cold(self) -> None:
        meters = Meters()
        meters.warmed("llama", [0, 1])
        for _ in range(2):
            meters.switched(switch(device=1))
        assert meters.devices[1].switches == {"cold": 1, "host_cached": 1}
        assert len(meters.switch_seconds["cold"]) == 1

    def test_stages_and_bytes_add_up(self) -> None:
        meter = DeviceMeter()
        for _ in range(2):
            meter.switched(SWITCH)
        assert meter.stage_seconds == {"evict": 0.25, "map": 0.5, "weights": 0.5, "kv": 0.25}
        moved = {"weights": 1 << 34, "weights_prefetched": 18, "weights_late": 8}
        moved |= {"kv_in": 14, "kv_out": 16}
        assert meter.moved_bytes == moved


class TestTurns:
    def test_they_last_from_when_the_model_could_run(self) -> None:
        meters = Meters()
        meters.turn_ended(0, ended("a"))
        meters.turn_ended(0, ended("a", began_s=1.125))
        assert meters.devices[0].turns == {"a": 2}
        assert meters.devices[0].turn_seconds == {"a": 0.375}

    def test_one_that_never_ran_does_not_count(self) -> None:
        meters = Meters()
        meters.turn_ended(0, ended("a", None))
        assert meters.devices[0].turns == {}
        assert meters.devices[0].switches == {}

    def test_another_model_without_a_switch_was_resident(self) -> None:
        meters = Meters()
        meters.switched(switch(device=0, model="a", weight_bytes=0, prefetched_bytes=0))
        for model in ("a", "b", "b", "a"):
            meters.turn_ended(0, ended(model))
        assert meters.devices[0].switches == {"resident": 3}
        assert len(meters.switch_seconds["resident"]) == 3

    def test_a_new_worker_has_nothing(self) -> None:
        meters = Meters()
        meters.switched(switch(device=0, model="a"))
        meters.devices[0].worker_ended()
        meters.switched(switch(device=0, model="a"))
        meters.turn_ended(0, ended("a"))
        assert meters.devices[0].switches == {"host_cached": 2}


def test_models_that_are_gone_leave_nothing() -> None:
    meters = Meters()
    for model in ("a", "b"):
        meters.refused(model, "queue_full")
        meters.turn_ended(0, ended(model))
    meters.warmed("a", [0])
    meters.forget_others(["b"])
    assert list(meters.models) == list(meters.devices[0].turns) == ["b"]
    assert list(meters.devices[0].turn_seconds) == ["b"]
    assert meters.devices[0].switched(switch(model="a")) == "host_cached"
