"""Turns that gather a lead before an exposed switch."""

from __future__ import annotations

import math

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import DeviceUp, ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy, turn_for_lead
from gpupoold.scheduling.policies.planned_turns import PlannedTurn, Tuning, rank_planned_turns
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, RequestPhase
from tests.unit.scheduling.driver import GB, Driver

TUNING = Tuning()
STEP_S, TBT_S = 0.02, 0.05
BACK_S = 0.5  # two models of 10 GB on 15 GB: 5 GB to copy at 10 GB/s
NEXT_S = 3.0  # the other model's turn, with its switch


@pytest.fixture
def device() -> DeviceState:
    """A device on which model a is resident, with an answer; model b has an answer too."""
    made = DeviceState(DeviceUp(0, 15 * GB, 10 * GB), missing_bytes={"a": 0, "b": 5 * GB})
    costs = ModelCosts(prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=STEP_S)
    for name in "ab":
        model = Model(name, Targets(1.0, TBT_S), 10 * GB, 0, costs)
        made.batches[name] = Batch(model)
        made.join(Request(name, model, 0.0, 10, None, phase=RequestPhase.DECODING))
    return made


def stay(
    device: DeviceState, lead_s: float, due_in_s: float, *, tokens: float = 50.0
) -> PlannedTurn | None:
    """Model a has a lead, b's turn is due."""
    turns = [
        PlannedTurn("a", lead_s, 0.3, 0.3, 6.0, is_ahead=True),
        PlannedTurn("b", due_in_s, NEXT_S, NEXT_S - 0.5, tokens),
    ]
    ranked = rank_planned_turns(turns, is_switching_dear=True)
    return turn_for_lead(ranked, device, TUNING)


def test_c11_decoding_earns_the_lead_for_the_absence(device: DeviceState) -> None:
    """Aegaeon, section 4.3: n steps of 20 ms with a target of 50 ms tolerate a delay of n 30 ms."""
    turn = stay(device, lead_s=2.0, due_in_s=20.0)
    assert turn is not None
    assert (turn.model, turn.rule) == ("a", Rule.GATHERS_LEAD)
    assert turn.quota_s == pytest.approx((NEXT_S + BACK_S - 2.0) / (TBT_S - STEP_S) * STEP_S)


def test_a_turn_that_is_late_anyway_waits_for_the_lead(device: DeviceState) -> None:
    """Otherwise both models would be late: the answers of a during the absence."""
    turn = stay(device, lead_s=2.0, due_in_s=-0.5)
    assert turn is not None
    assert turn.quota_s == pytest.approx((NEXT_S + BACK_S - 2.0) / (TBT_S - STEP_S) * STEP_S)


def test_no_longer_than_the_next_turn_can_wait(device: DeviceState) -> None:
    turn = stay(device, lead_s=2.0, due_in_s=0.6)
    assert turn is not None
    assert turn.quota_s == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("lead_s", "due_in_s", "tokens"),
    [
        (NEXT_S + BACK_S + 0.1, 20.0, 50.0),  # the lead is long enough
        (2.0, TUNING.turn_min_s / 2, 50.0),  # the next turn cannot wait
        (2.0, -70.0, math.inf),  # the other model is starving
    ],
)
def test_otherwise_the_next_turn_begins(
    device: DeviceState, lead_s: float, due_in_s: float, tokens: float
) -> None:
    assert stay(device, lead_s, due_in_s, tokens=tokens) is None


def test_a_model_that_is_not_resident_does_not_go_first(device: DeviceState) -> None:
    device.missing_bytes["a"] = GB
    assert stay(device, lead_s=2.0, due_in_s=20.0) is None


@pytest.mark.parametrize(("ttft_s", "is_cut"), [(0.9, False), (1.5, True)])
def test_a_turn_is_cut_for_a_request_that_can_be_on_time(ttft_s: float, *, is_cut: bool) -> None:
    """The copy takes a second, the prompt a tenth."""
    driver = Driver(GpupoolPolicy(), "a b", targets=Targets(10.0, TBT_S), capacity_bytes=15 * GB)
    driver.send(e.TargetsChanged("b", Targets(ttft_s, TBT_S)))
    driver.arrive("a", "r")
    before = driver.quota_s()
    driver.arrive("b", "late", at_s=0.1)
    assert (driver.quota_s() < before) == is_cut
