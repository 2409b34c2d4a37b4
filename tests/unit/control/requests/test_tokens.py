"""Stages of the time until each token, and the causes of late tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, strategies as st

from gpupoold.control.accounting.model_stats import Counts, ModelStats
from gpupoold.control.live_requests import LiveRequests
from gpupoold.control.requests.accounts import Accounts
from gpupoold.domain import Targets
from gpupoold.durations import RequestStages
from gpupoold.scheduling.events import DeviceUp, Turn
from gpupoold.scheduling.state import DeviceState, State
from gpupoold.wire import messages as m
from tests.unit.control.live import live_request
from tests.unit.wire.samples import SWITCH


class Bench:
    """One device on which model "m" has had its turn since second 4."""

    def __init__(self, turn_began_s: float = 4.0) -> None:
        turn = Turn(1, "m", 1.0)
        self.device = device = DeviceState(
            DeviceUp(0, 1, 1.0), turn=turn, turn_began_s=turn_began_s
        )
        self.live = LiveRequests()
        self.request = live_request()
        self.live.add(self.request)
        self.charged: list[tuple[str, int]] = []
        history = SimpleNamespace(record_switch=lambda switch: None)
        keys = SimpleNamespace(charge=lambda *charged: self.charged.append(charged))
        self.accounts = Accounts(
            cast(Any, history), self.live, State(devices={0: device}), cast(Any, keys)
        )
        self.stats = self.accounts.stats
        self.stats["m"] = ModelStats()

    def switch(self, at_s: float, total_s: float, model: str = "m", kv_s: float = 0.0) -> None:
        switch = replace(SWITCH, device=0, model=model, at_s=at_s, total_s=total_s, kv_s=kv_s)
        self.accounts.switched(switch)

    def token(self, at_s: float, number: int = 0) -> Counts:
        progress = [m.RequestProgress("r", [1]), m.RequestProgress("unknown", [1])]
        self.accounts.stepped(number, m.StepOutputs("m", at_s, [], progress))
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
        bench.accounts.stepped(0, m.StepOutputs(model, 1.0, [], [], drafts=counts))
    assert bench.stats["m"].drafts == m.DraftCounts(3, 12, 3)
    assert bench.stats["m"].drafts.acceptance_length == 2.0
    assert m.DraftCounts().acceptance_length is None


def test_tokens_of_one_step_have_their_own_deadlines_and_no_time_between_them() -> None:
    bench = Bench()
    bench.token(1.0)
    bench.accounts.stepped(0, m.StepOutputs("m", 1.5, [], [m.RequestProgress("r", [1, 2, 3])]))
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


def stages(found: RequestStages) -> list[float]:
    return list(found.by_name().values())


def test_the_time_to_a_first_token_in_time_is_divided_too() -> None:
    bench = Bench()
    bench.request.targets = Targets(60.0, 1.0)
    bench.request.warmed_s = 1.0
    bench.switch(at_s=5.0, total_s=2.0, kv_s=0.5)
    now = bench.token(10.0)
    assert stages(now.first_token) == pytest.approx([1.0, 3.0, 1.5, 0.5, 4.0])
    assert stages(now.between_tokens) == [0.0] * 5
    assert parts(now) == [0.0] * 4
    assert now.first_tokens == 1


def test_tokens_of_one_turn_are_computed_and_a_pause_is_divided() -> None:
    bench = Bench()
    bench.token(5.0)
    bench.token(5.5)
    now = bench.token(6.0)
    assert stages(now.between_tokens) == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])
    bench.device.turn_began_s = 8.0
    bench.switch(at_s=8.0, total_s=1.0, kv_s=0.25)
    now = bench.token(10.0)
    assert stages(now.between_tokens) == pytest.approx([0.0, 2.0, 0.75, 0.25, 2.0])
    assert now.first_tokens == 1


def test_a_request_that_arrives_during_the_switch_waits_for_its_rest() -> None:
    bench = Bench()
    bench.request.arrival_s = 5.5
    bench.switch(at_s=5.0, total_s=1.0)
    assert stages(bench.token(7.0).first_token) == pytest.approx([0.0, 0.0, 0.5, 0.0, 1.0])


def test_lateness_by_kv_is_lateness_by_switching() -> None:
    bench = Bench()
    bench.switch(at_s=5.0, total_s=2.0, kv_s=1.0)
    assert parts(bench.token(10.0))[2] == pytest.approx(1.8)


def test_waiting_during_the_turn_for_kv_from_another_device() -> None:
    bench = Bench(turn_began_s=0.0)
    bench.token(5.0)
    bench.request.attached_s = 5.25
    assert stages(bench.token(6.0).between_tokens) == pytest.approx([0.0, 0.0, 0.0, 0.25, 0.75])
    bench.device.turn_began_s = 8.0
    bench.request.attached_s = 7.0
    now = bench.token(10.0)
    assert stages(now.between_tokens) == pytest.approx([0.0, 2.0, 0.0, 0.25, 2.75]), "hidden"


def test_progress_without_a_token_has_no_stages() -> None:
    bench = Bench()
    bench.accounts.stepped(0, m.StepOutputs("m", 5.0, [], [m.RequestProgress("r", [], "abort")]))
    now = bench.stats["m"].now
    assert stages(now.first_token) == [0.0] * 5
    assert now.first_tokens == 0


class Step(NamedTuple):
    """A token after a pause; times are relative to the pause's beginning."""

    pause_s: float
    turn_s: float
    switch_s: float
    switch_total_s: float
    kv_share: float
    warmed_s: float | None
    attached_s: float | None
    num_tokens: int
    switch_model: str
    device: int


around = st.floats(-3.0, 6.0)
some_steps = st.lists(
    st.builds(
        Step,
        pause_s=st.floats(0.0, 10.0),
        turn_s=around,
        switch_s=around,
        switch_total_s=st.floats(0.0, 5.0),
        kv_share=st.floats(0.0, 1.0),
        warmed_s=st.none() | around,
        attached_s=st.none() | around,
        num_tokens=st.integers(1, 3),
        switch_model=st.sampled_from(["m", "other"]),
        device=st.sampled_from([0, 7]),
    ),
    min_size=1,
    max_size=8,
)


@given(steps=some_steps)
def test_stages_are_never_negative_and_make_up_ttft_and_tbt(steps: list[Step]) -> None:
    bench, at_s = Bench(), 0.0
    for one in steps:
        bench.device.turn_began_s = at_s + one.turn_s
        kv_s = one.kv_share * one.switch_total_s
        bench.switch(at_s + one.switch_s, one.switch_total_s, one.switch_model, kv_s)
        bench.request.warmed_s = None if one.warmed_s is None else at_s + one.warmed_s
        bench.request.attached_s = None if one.attached_s is None else at_s + one.attached_s
        at_s += one.pause_s
        progress = [m.RequestProgress("r", [1] * one.num_tokens)]
        bench.accounts.stepped(one.device, m.StepOutputs("m", at_s, [], progress))
    now = bench.stats["m"].now
    assert now.first_token.total_s == pytest.approx(now.ttft.sum_s, abs=1e-9)
    assert now.between_tokens.total_s == pytest.approx(now.tbt.sum_s, abs=1e-9)
    assert min(stages(now.first_token) + stages(now.between_tokens)) >= -1e-12
    assert now.first_tokens == len(now.ttft) == 1
    assert now.lateness.total_s >= bench.request.late_s - 1e-9
