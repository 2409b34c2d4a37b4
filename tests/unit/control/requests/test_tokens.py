"""What made tokens late: time until the model was warm, until its turn, its switch, its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.control.accounting.model_stats import Counts, ModelStats
from gpupoold.control.live_requests import LiveRequests
from gpupoold.control.requests.tokens import TokenCounter
from gpupoold.scheduling.actions import Turn
from gpupoold.scheduling.state import DeviceState, State
from gpupoold.wire import messages as m
from tests.unit.control.live import live_request
from tests.unit.wire.samples import SWITCH


class Bench:
    """One device on which model "m" has had its turn since second 4."""

    def __init__(self, turn_began_s: float = 4.0) -> None:
        device = DeviceState(0, 1, 1.0, turn=Turn(1, "m", 1.0), turn_began_s=turn_began_s)
        self.live = LiveRequests()
        self.request = live_request()
        self.live.add(self.request)
        self.stats = {"m": ModelStats()}
        self.charged: list[tuple[str, int]] = []
        self.tokens = TokenCounter(
            self.live,
            self.stats,
            State(devices={0: device}),
            lambda *charged: self.charged.append(charged),
        )

    def switch(self, at_s: float, total_s: float, model: str = "m") -> None:
        self.tokens.switched(replace(SWITCH, device=0, model=model, at_s=at_s, total_s=total_s))

    def token(self, at_s: float, number: int = 0) -> Counts:
        progress = [m.RequestProgress("r", [1]), m.RequestProgress("unknown", [1])]
        self.tokens.stepped(number, m.StepOutputs("m", at_s, [], progress))
        return self.stats["m"].now


def parts(counts: Counts) -> list[float]:
    return [
        counts.lateness.loading_s,
        counts.lateness.queueing_s,
        counts.lateness.switching_s,
        counts.lateness.computing_s,
    ]


def test_key_of_a_request_is_charged() -> None:
    bench = Bench()
    bench.token(1.0)
    assert bench.charged == []
    bench.request.key_id = "web"
    bench.token(2.0)
    assert bench.charged == [("web", 1)]


def test_drafts_are_added_to_the_model_that_still_exists() -> None:
    bench = Bench()
    for model, drafts in (("m", (2, 8, 3)), ("m", (1, 4, 0)), ("removed", (1, 4, 4))):
        counts = m.DraftCounts(*drafts)
        bench.tokens.stepped(0, m.StepOutputs(model, 1.0, [], [], drafts=counts))
    assert bench.stats["m"].drafts == m.DraftCounts(3, 12, 3)
    assert bench.stats["m"].drafts.acceptance_length == 2.0
    assert m.DraftCounts().acceptance_length is None


def test_tokens_of_one_step_have_their_own_deadlines_and_no_time_between_them() -> None:
    bench = Bench()
    bench.token(1.0)
    bench.tokens.stepped(0, m.StepOutputs("m", 1.5, [], [m.RequestProgress("r", [1, 2, 3])]))
    now = bench.stats["m"].now
    assert now.tokens == 4
    assert len(now.tbt) == 3
    assert now.tbt.sum_s == pytest.approx(0.5)


def test_in_time() -> None:
    assert parts(Bench().token(1.0)) == [0.0, 0.0, 0.0, 0.0]


def test_a_late_first_token_is_divided_by_what_the_time_went_into() -> None:
    bench = Bench()
    bench.request.warmed_s = 2.0
    bench.switch(at_s=5.0, total_s=2.0)
    # Of 10 s: 2 until it was warm, 2 until its turn, 2 for the switch, 4 else; 9 s too late.
    assert parts(bench.token(10.0)) == pytest.approx([1.8, 1.8, 1.8, 3.6])


def test_only_what_is_newly_late_counts() -> None:
    bench = Bench(turn_began_s=0.0)
    assert sum(parts(bench.token(3.0))) == pytest.approx(2.0)
    assert sum(parts(bench.token(3.25))) == pytest.approx(2.0), "it has caught up a little"
    assert sum(parts(bench.token(4.5))) == pytest.approx(2.75), "1.25 s where 0.5 s are allowed"


def test_a_switch_to_another_model_or_before_its_turn_does_not_count() -> None:
    bench = Bench()
    bench.switch(at_s=5.0, total_s=2.0, model="other")
    assert parts(bench.token(8.0))[2] == 0.0
    bench = Bench()
    bench.switch(at_s=1.0, total_s=2.0)
    assert parts(bench.token(8.0)) == pytest.approx([0.0, 3.5, 0.0, 3.5])


def test_a_device_that_has_gone_meanwhile() -> None:
    bench = Bench()
    assert parts(bench.token(2.0, number=7)) == pytest.approx([0.0, 0.0, 0.0, 1.0])


def test_parts_are_never_negative_and_make_up_the_whole() -> None:
    for began_s in (-1.0, 0.0, 3.0, 9.0):
        for switch_s in (-3.0, 2.0, 8.5, 12.0):
            bench = Bench(began_s)
            bench.request.warmed_s = 2.5
            bench.switch(switch_s, 2.0)
            found = parts(bench.token(9.0))
            assert min(found) >= 0.0
            assert sum(found) == pytest.approx(8.0)
