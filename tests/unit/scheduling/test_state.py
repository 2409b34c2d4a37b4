"""Lookups of the state, and the life of a request as a table."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling.core import _move
from gpupoold.scheduling.events import DeviceUp, ModelCosts
from gpupoold.scheduling.state import (
    TRANSITIONS,
    Batch,
    DeviceState,
    IllegalTransition,
    Model,
    Request,
    RequestPhase,
    State,
    Trigger,
)

COSTS = ModelCosts(prefill_base_s=0.5, prefill_token_s=0.01, decode_base_s=0.02)
MODEL = Model("a", Targets(3.0, 0.5), 10, 2, COSTS)


def request(
    phase: RequestPhase = RequestPhase.HELD, num_tokens: int = 0, arrival_s: float = 1.0
) -> Request:
    return Request("r", MODEL, arrival_s, 100, None, phase, 0, num_tokens)


@pytest.mark.parametrize(("phase", "trigger"), itertools.product(RequestPhase, Trigger))
def test_what_is_not_in_the_table_is_refused(phase: RequestPhase, trigger: Trigger) -> None:
    one = request(phase)
    if (phase, trigger) in TRANSITIONS:
        _move(one, trigger)
        assert one.phase is TRANSITIONS[phase, trigger]
        return
    with pytest.raises(IllegalTransition, match=f"r of a .*is {phase.name}.*{trigger.name}"):
        _move(one, trigger)
    assert one.phase is phase


def test_every_phase_can_be_reached_and_left() -> None:
    reached = {RequestPhase.HELD, *TRANSITIONS.values()}
    assert reached == set(RequestPhase)
    assert {phase for phase, _ in TRANSITIONS} == set(RequestPhase)
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_deadlines_are_fixed_at_arrival() -> None:
    assert request().next_deadline_s == 4.0
    assert request(num_tokens=3).next_deadline_s == 5.5
    own = request(num_tokens=3)
    own.ttft_s = own.model.targets.ttft_s + 2.0
    assert own.next_deadline_s == 7.5
    assert own.counted_arrival_s == own.arrival_s + 2.0
    assert request(num_tokens=3).context_tokens == 103


def test_a_batch() -> None:
    batch = Batch(MODEL)
    assert batch.next_deadline_s() == math.inf
    assert batch.prefill_s() == 0.0
    batch.add(Request("r", MODEL, 1.0, 100, None, RequestPhase.SENT, 0))
    batch.add(Request("s", MODEL, -5.0, 100, None, RequestPhase.DECODING, 0, 2))
    assert batch.next_deadline_s() == -1.0
    assert batch.prefill_s() == pytest.approx(1.5)
    assert batch.step_s() == 0.02
    assert batch.kv_bytes == 2 * 102


def test_the_sums_of_a_batch_follow_its_requests() -> None:
    first, second = (
        Request(name, MODEL, 0.0, tokens, None, RequestPhase.SENT, 0)
        for name, tokens in (("r", 30), ("s", 40))
    )
    batch = Batch(MODEL)
    batch.add(first)
    batch.add(second)
    assert (batch.num_waiting, batch.waiting_tokens, batch.waiting_tokens2) == (2, 70, 2500)
    assert batch.load() == pytest.approx(0.02 / 0.5 + (2 * 0.5 + 0.7) / 3.0)
    batch.prefilled(first)
    first.phase, first.num_tokens = RequestPhase.DECODING, 1
    batch.grow(1)
    assert (batch.num_waiting, batch.waiting_tokens, batch.context_tokens) == (1, 40, 31)
    assert batch.load() == pytest.approx(0.02 / 0.5 + 0.9 / 3.0)
    batch.remove(second)
    batch.remove(first)
    assert (batch.num_waiting, batch.waiting_tokens2, batch.context_tokens) == (0, 0, 0)


def test_a_device_counts_bytes() -> None:
    device = DeviceState(DeviceUp(0, 100, 5.0))
    assert (device.missing(MODEL), device.switch_s(MODEL)) == (10, 2.0)
    device.missing_bytes["a"] = 0
    assert (device.missing(MODEL), device.total_bytes(MODEL)) == (0, 10)
    device.batches["a"] = Batch(MODEL, context_tokens=20)
    assert device.total_bytes(MODEL) == 50


def test_hosts_are_in_order() -> None:
    state = State(devices={number: DeviceState(DeviceUp(number, 1, 1.0)) for number in (10, 2, 33)})
    model = Model("a", Targets(), 1, 1, COSTS, hosts={33, 10, 2})
    assert [device.number for device in state.hosts(model)] == [2, 10, 33]


def test_a_copy_shares_nothing_and_keeps_identities() -> None:
    batch = Batch(MODEL, {"r": request(RequestPhase.SENT)}, 1)
    state = State(
        {"a": MODEL},
        {0: DeviceState(DeviceUp(0, 1, 1.0), batches={"a": batch})},
        dict(batch.requests),
    )
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin.requests["r"] is twin.devices[0].batches["a"].requests["r"]
        assert twin.requests["r"].model is twin.models["a"] is not MODEL
