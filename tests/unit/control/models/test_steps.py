"""The steps of a model: which begin in which state, and what the failure of each means."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gpupoold.control.fleet.states import (
    HostPhase,
    ModelPhase,
)
from gpupoold.control.models.steps import (
    STARTING_S,
    Cause,
    EnginesFull,
    FailureVerdict,
    HostingPlan,
    HostState,
    ModelStep,
    ModelView,
    StepKind,
    WeightsState,
    next_steps,
    verdict,
)
from gpupoold.control.weights.cache import CacheFull, Space
from gpupoold.control.workers.worker import WorkerEnded, WorkerIsDown
from gpupoold.errors import Failed, GpupoolError, TimedOut, Unavailable
from gpupoold.scheduling.hosting import HostingChoice, HostingReason

LOAD_TIMEOUT_S = 600.0
ABSENT, LOADED, ATTACHED = HostPhase.ABSENT, HostPhase.LOADED, HostPhase.ATTACHED
NEEDED, SPARE = HostingReason.NEEDED, HostingReason.SPARE
EVICTED = HostingPlan(evict=frozenset({0}))
OUTDATED = {0: HostState(ATTACHED, is_outdated=True), 1: HostState()}
CACHED, FULL = WeightsState(is_cached=True), WeightsState(space=Space.LATER)
K = StepKind


def plan_of(*devices: int) -> HostingPlan:
    return HostingPlan(tuple(HostingChoice(one, SPARE) for one in devices))


def serving(host: HostPhase = ATTACHED, **changes: object) -> ModelView:
    """A model that device 0 serves, beside an idle device 1."""
    hosts = {0: HostState(host), 1: HostState()}
    state = ModelView(hosts=hosts, weights={1: CACHED}, devices=(0,))
    return replace(state, **changes)  # type: ignore[arg-type]


def nowhere(**changes: object) -> ModelView:
    """A model without a device and without a snapshot."""
    state = ModelView(
        ModelPhase.LOADING, {0: HostState(), 1: HostState()}, {1: WeightsState()}, is_open=False
    )
    return replace(state, **changes)  # type: ignore[arg-type]


def kinds(state: ModelView, plan: HostingPlan, now_s: float = 0.0) -> list[str]:
    return [one.key for one in next_steps(state, plan, LOAD_TIMEOUT_S, now_s).steps]


@pytest.mark.parametrize(
    ("state", "plan", "expected"),
    [
        (nowhere(), plan_of(0, 1), ["load 0"]),  # one device makes the snapshot for all
        (nowhere(weights={1: CACHED}), plan_of(0, 1), ["load 0", "load 1"]),
        (nowhere(weights={1: CACHED}, is_trial=True), plan_of(0, 1), ["load 0"]),
        (nowhere(weights={1: CACHED}, is_added=True), plan_of(1, 0), ["load 1"]),
        (nowhere(phase=ModelPhase.DRAINING), plan_of(0, 1), []),
        (nowhere(phase=ModelPhase.DRAINING, num_waiting=1), plan_of(0), []),
        (
            nowhere(phase=ModelPhase.DRAINING, num_waiting=1, is_evicted=True),
            plan_of(0),
            ["load 0"],
        ),
        (serving(LOADED, phase=ModelPhase.DRAINING, num_waiting=1), plan_of(1), ["bring 1"]),
        (serving(LOADED, phase=ModelPhase.DRAINING), plan_of(1), []),
        (nowhere(is_held=True), plan_of(0, 1), []),
        (nowhere(is_shut_out=True, is_failed=True), plan_of(0, 1), []),
        (nowhere(is_shut_out=True, is_recorded=False), plan_of(0, 1), ["withdraw 0"]),
        (serving(is_shut_out=True), plan_of(1), ["withdraw 0"]),
        (serving(is_shut_out=True, under_way=frozenset({ModelStep(K.LOAD, 1)})), plan_of(), []),
        (nowhere(is_shut_out=True, is_failed=True, is_trial=True), plan_of(0), ["load 0"]),
        (nowhere(is_failed=True), plan_of(0, 1), []),
        (nowhere(is_failed=True, is_wished=True), plan_of(0), ["load 0"]),
        (
            nowhere(is_failed=True, hosts={0: HostState(), 1: HostState(is_new=True)}),
            plan_of(0, 1),
            ["load 1"],
        ),
        (nowhere(weights={1: FULL}), plan_of(0, 1), []),
        (nowhere(weights={1: WeightsState(space=Space.NEVER)}), plan_of(0), ["fail"]),
        (nowhere(weights={1: FULL}, is_added=True), plan_of(0), ["fail"]),
        (nowhere(weights={1: FULL}, waits_since_s=-LOAD_TIMEOUT_S), plan_of(0), ["fail"]),
        (nowhere(), plan_of(), []),
        (nowhere(is_trial=True), plan_of(), ["fail"]),
        (nowhere(is_added=True), HostingPlan(has_devices=False, may_start=True), []),
        (nowhere(retry_at_s={"load 0": 9.0}), plan_of(0, 1), ["load 1"]),
        (serving(), plan_of(1), ["load 1"]),
        (serving(is_open=False), plan_of(1), ["open 0", "load 1"]),
        (serving(is_open=False, is_added=True), plan_of(1), ["open 0", "load 1"]),
        (serving(is_open=False, under_way=frozenset({ModelStep(K.OPEN)})), plan_of(), []),
        (serving(phase=ModelPhase.FAILED, is_failed=True), plan_of(), ["open 0"]),
        (serving(), HostingPlan(leave=frozenset({0})), ["leave 0"]),
        (serving(), EVICTED, ["evict 0"]),
        (serving(phase=ModelPhase.DRAINING), EVICTED, ["evict 0"]),
        (serving(is_held=True), EVICTED, []),
        (serving(under_way=frozenset({ModelStep(K.LOAD, 1)})), EVICTED, []),
        (serving(is_removed=True, is_held=True), plan_of(1), ["remove 0"]),
        (serving(is_removed=True, under_way=frozenset({ModelStep(K.LOAD, 1)})), EVICTED, []),
        (nowhere(is_removed=True, is_added=True), plan_of(0), ["remove 0"]),
        (nowhere(is_added=True, phase=ModelPhase.DRAINING), plan_of(0), ["load 0"]),
        (serving(hosts=OUTDATED), plan_of(1), ["replace 0"]),
        (serving(hosts=OUTDATED, phase=ModelPhase.DRAINING), plan_of(1), ["replace 0"]),
        (serving(hosts=OUTDATED, is_held=True), plan_of(1), []),
        (serving(hosts=OUTDATED, retry_at_s={"replace 0": 9.0}), plan_of(1), ["load 1"]),
        (serving(hosts=OUTDATED, under_way=frozenset({ModelStep(K.LOAD, 1)})), plan_of(), []),
        (
            serving(hosts={0: HostState(LOADED, is_resting=True, is_outdated=True)}),
            plan_of(),
            ["leave 0"],
        ),
        (serving(is_damaged=True), plan_of(1), ["renew 0"]),
        (serving(is_damaged=True, under_way=frozenset({ModelStep(K.LOAD, 1)})), plan_of(), []),
        (serving(LOADED), plan_of(), []),  # nobody asks
        (serving(LOADED, num_waiting=1), plan_of(1), ["bring 1"]),
        (serving(LOADED, is_wished=True, weights={1: WeightsState()}), plan_of(1), ["bring 1"]),
        (
            serving(LOADED, num_waiting=1, under_way=frozenset({ModelStep(K.LOAD, 1)})),
            plan_of(),
            [],
        ),
        (serving(LOADED, num_waiting=1, weights={1: FULL}), plan_of(1), []),
        (
            serving(LOADED, num_waiting=1, weights={1: WeightsState(space=Space.NEVER)}),
            plan_of(1),
            ["fail"],
        ),
        (serving(devices=(), is_evicted=True, hosts={0: HostState()}), plan_of(), []),
    ],
)
def test_steps_that_begin(state: ModelView, plan: HostingPlan, expected: list[str]) -> None:
    assert kinds(state, plan) == expected


def test_one_engine_of_each_degree_is_replaced_first() -> None:
    old = HostState(ATTACHED, is_outdated=True)
    hosts = {0: old, 1: replace(old, degree=2), 2: old, 3: replace(old, degree=2)}
    model = ModelView(hosts=hosts, weights={1: CACHED, 2: CACHED}, devices=(0, 1, 2, 3))
    assert kinds(model, plan_of()) == ["replace 0"]
    under_way = frozenset({ModelStep(K.REPLACE, 0, is_alone=True)})
    assert kinds(replace(model, under_way=under_way), plan_of()) == []
    model = replace(model, hosts={**hosts, 0: HostState(ATTACHED)})
    assert kinds(model, plan_of()) == ["replace 1"]
    model = replace(model, hosts={**model.hosts, 1: HostState(ATTACHED, degree=2)})
    assert kinds(model, plan_of()) == ["replace 2", "replace 3"]
    one = replace(model, under_way=frozenset({ModelStep(K.REPLACE, 2)}))
    assert kinds(one, plan_of()) == ["replace 3"]


def test_a_replacement_that_failed_evicts_no_engine_when_tried_again() -> None:
    model = serving(hosts=OUTDATED)
    [first] = next_steps(model, plan_of(), LOAD_TIMEOUT_S, 0.0).steps
    failed = replace(model, retry_at_s={"replace 0": 9.0})
    [again] = next_steps(failed, plan_of(), LOAD_TIMEOUT_S, 9.0).steps
    assert (first.reason, again.reason) == (NEEDED, SPARE)
    assert first.key == again.key


def of_degrees(single: WeightsState, group: WeightsState, **changes: object) -> ModelView:
    """A model on a single GPU without its snapshot, and on a group of two with its snapshot."""
    hosts = {0: HostState(LOADED), 1: HostState(ATTACHED, degree=2)}
    state = ModelView(hosts=hosts, weights={1: single, 2: group}, devices=(0, 1), num_waiting=1)
    return replace(state, **changes)  # type: ignore[arg-type]


def test_a_degree_without_memory_rests_while_the_other_serves() -> None:
    assert kinds(of_degrees(FULL, CACHED), plan_of()) == ["rest 1"]
    under_way = frozenset({ModelStep(K.REST, 1, is_alone=True)})
    assert kinds(of_degrees(FULL, CACHED, under_way=under_way), plan_of()) == []
    assert kinds(of_degrees(WeightsState(), CACHED), plan_of()) == ["bring 1"]
    assert kinds(of_degrees(FULL, FULL), plan_of()) == []
    resting = {0: HostState(LOADED, is_resting=True), 1: HostState(ATTACHED, degree=2)}
    rested = of_degrees(FULL, CACHED, hosts=resting, num_waiting=0, num_live=1)
    assert kinds(rested, plan_of()) == []
    evicts = WeightsState(space=Space.EVICTS)
    assert kinds(replace(rested, weights={1: evicts, 2: CACHED}), plan_of()) == []
    assert kinds(replace(rested, weights={1: WeightsState(), 2: CACHED}), plan_of()) == ["bring 1"]
    asleep = {0: HostState(LOADED, is_resting=True)}
    lost = of_degrees(evicts, CACHED, hosts=asleep, devices=(0,), num_waiting=0, num_live=1)
    assert kinds(lost, plan_of()) == ["bring 1"]


def test_waits_are_facts() -> None:
    decision = next_steps(nowhere(weights={1: FULL}), plan_of(0), LOAD_TIMEOUT_S, 5.0)
    assert decision.wait is not None
    assert (decision.wait.cause, decision.wait.until_s) == (Cause.MEMORY, 5.0 + LOAD_TIMEOUT_S)
    decision = next_steps(nowhere(), plan_of(), LOAD_TIMEOUT_S, 5.0)
    assert decision.wait is not None
    assert (decision.wait.cause, decision.wait.until_s) == (Cause.ENGINES, math.inf)
    late = nowhere(retry_at_s={"load 0": 9.0})
    decision = next_steps(late, plan_of(0), LOAD_TIMEOUT_S, 5.0)
    assert decision.wait is not None
    assert decision.wait.cause is Cause.RETRY
    plan = HostingPlan(has_devices=False, may_start=True)
    decision = next_steps(nowhere(is_added=True), plan, LOAD_TIMEOUT_S, 5.0)
    assert decision.wait is not None
    assert (decision.wait.cause, decision.wait.until_s) == (Cause.SERVICE, 5.0 + STARTING_S)
    decision = next_steps(nowhere(is_evicted=True, num_live=1), plan, LOAD_TIMEOUT_S, 5.0)
    assert decision.wait is not None
    assert (decision.wait.cause, decision.wait.until_s) == (Cause.SERVICE, 5.0 + LOAD_TIMEOUT_S)
    busy = nowhere(hosts={0: HostState(is_idle=False)})
    decision = next_steps(busy, plan_of(0), LOAD_TIMEOUT_S, 5.0)
    assert not decision.steps
    assert decision.blocked == {0}
    assert decision.wait is None


LOAD, BRING, OPEN, FAIL = (
    ModelStep(K.LOAD, 0),
    ModelStep(K.BRING, 1),
    ModelStep(K.OPEN),
    ModelStep(K.FAIL),
)


@pytest.mark.parametrize(
    ("state", "step", "error", "expected"),
    [
        (nowhere(), LOAD, Failed("no file"), FailureVerdict.NOT_LOADED),
        (nowhere(), LOAD, WorkerEnded("killed"), FailureVerdict.LATER),
        (nowhere(), LOAD, EnginesFull("larger"), FailureVerdict.LATER),
        (nowhere(), LOAD, CacheFull("larger"), FailureVerdict.NOT_LOADED),
        (nowhere(weights={1: FULL}), LOAD, CacheFull("taken"), FailureVerdict.LATER),
        (nowhere(is_trial=True), LOAD, Failed("no file"), FailureVerdict.FAILED_AGAIN),
        (nowhere(is_trial=True), LOAD, WorkerEnded("killed"), FailureVerdict.POSTPONED),
        (nowhere(is_trial=True), FAIL, Unavailable("none"), FailureVerdict.POSTPONED),
        (nowhere(is_trial=True), FAIL, EnginesFull("full"), FailureVerdict.FAILED_AGAIN),
        (nowhere(is_added=True), LOAD, WorkerIsDown("down"), FailureVerdict.LATER),
        (nowhere(is_added=True), LOAD, WorkerEnded("killed"), FailureVerdict.RAISED),
        (nowhere(is_added=True), LOAD, CacheFull("full"), FailureVerdict.RAISED),
        (nowhere(is_wished=True), FAIL, Unavailable("none"), FailureVerdict.RAISED),
        (nowhere(is_failed=True), FAIL, Unavailable("none"), FailureVerdict.NOT_LOADED),
        (nowhere(), FAIL, TimedOut("memory"), FailureVerdict.NOT_LOADED),
        (nowhere(is_evicted=True), LOAD, Failed("no file"), FailureVerdict.NOT_WARMED),
        (nowhere(is_evicted=True), FAIL, EnginesFull("full"), FailureVerdict.NOT_WARMED),
        (serving(), ModelStep(K.LOAD, 1), Failed("no file"), FailureVerdict.NOTED),
        (serving(), ModelStep(K.LOAD, 1), CacheFull("full"), FailureVerdict.LATER),
        (
            nowhere(under_way=frozenset({ModelStep(K.LOAD, 1)})),
            LOAD,
            Failed("no"),
            FailureVerdict.NOTED,
        ),
        (serving(), BRING, CacheFull("full"), FailureVerdict.LATER),
        (serving(), BRING, WorkerEnded("killed"), FailureVerdict.LATER),
        (serving(), BRING, Failed("no memory to pin"), FailureVerdict.NOT_WARMED),
        (serving(), ModelStep(K.RENEW), CacheFull("full"), FailureVerdict.NOT_WARMED),
        (serving(), OPEN, Failed("no parser"), FailureVerdict.NOTED),
        (serving(is_trial=True), OPEN, Failed("no parser"), FailureVerdict.FAILED_AGAIN),
        (serving(is_added=True), OPEN, Failed("no parser"), FailureVerdict.RAISED),
        (serving(), ModelStep(K.LEAVE), TimedOut("no answer"), FailureVerdict.LATER),
        (serving(), ModelStep(K.EVICT), TimedOut("no answer"), FailureVerdict.LATER),
        (serving(), ModelStep(K.REMOVE), TimedOut("no answer"), FailureVerdict.RAISED),
        (serving(), ModelStep(K.REPLACE), WorkerEnded("killed"), FailureVerdict.RAISED),
    ],
)
def test_verdicts(
    state: ModelView, step: ModelStep, error: GpupoolError, expected: FailureVerdict
) -> None:
    assert verdict(state, step, error) is expected
