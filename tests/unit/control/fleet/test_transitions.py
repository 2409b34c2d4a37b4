"""The tables of phases: what may follow what, and what an impossible event says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpupoold.control.fleet.fleet import Availability
from gpupoold.control.fleet.states import (
    HOST_TRANSITIONS,
    MODEL_TRANSITIONS,
    HostEvent,
    HostPhase,
    Life,
    ModelEvent,
    ModelPhase,
)
from gpupoold.scheduling.state import IllegalTransition

M, E = ModelPhase, ModelEvent
PAGE = (Path(__file__).parents[4] / "docs/internals/architecture.md").read_text()


def life(phase: ModelPhase = M.REMOVED) -> Life[ModelPhase, ModelEvent]:
    return Life("llama", phase, MODEL_TRANSITIONS)


@pytest.mark.parametrize("phase", ModelPhase)
@pytest.mark.parametrize("event", ModelEvent)
def test_what_is_not_in_the_table_raises_and_changes_nothing(
    phase: ModelPhase, event: ModelEvent
) -> None:
    model = life(phase)
    after = MODEL_TRANSITIONS.get((phase, event))
    if after is not None:
        model.move(event)
        assert model.phase is after
        return
    with pytest.raises(IllegalTransition):
        model.move(event)
    assert model.phase is phase


def test_an_error_names_the_latest_transitions() -> None:
    model = life()
    for event in (E.REGISTER, E.LOAD, E.OPEN, E.LOSE_DEVICES, E.FAIL, E.QUARANTINE):
        model.move(event)
    with pytest.raises(IllegalTransition) as raised:
        model.move(E.OPEN)
    assert str(raised.value) == (
        "llama is QUARANTINED: OPEN is no event of this phase (so far: REGISTERED -LOAD-> "
        "LOADING -OPEN-> READY -LOSE_DEVICES-> LOADING -FAIL-> FAILED -QUARANTINE-> QUARANTINED)"
    )


def test_every_phase_can_be_reached_and_left() -> None:
    models = set(MODEL_TRANSITIONS.values())
    assert models == set(ModelPhase) == {phase for phase, _ in MODEL_TRANSITIONS}
    hosts = set(HOST_TRANSITIONS.values())
    assert hosts == set(HostPhase) == {phase for phase, _ in HOST_TRANSITIONS}


def test_only_a_loading_model_becomes_ready_and_only_a_loaded_host_gets_a_snapshot() -> None:
    opened = [cause for cause, after in MODEL_TRANSITIONS.items() if after is M.READY]
    assert opened == [(M.LOADING, E.OPEN)]
    attached = [cause for cause, after in HOST_TRANSITIONS.items() if after is HostPhase.ATTACHED]
    assert attached == [(HostPhase.LOADED, HostEvent.ATTACH)]


def test_a_removed_model_or_a_lost_worker_can_come_back() -> None:
    for phase in set(ModelPhase) - {M.REMOVED}:
        model = life(phase)
        model.move(E.REMOVE)
        model.move(E.PROPOSE)
    for host_phase in HostPhase:
        host = Life("llama on worker 0", host_phase, HOST_TRANSITIONS)
        host.move(HostEvent.LOSE_WORKER)
        host.move(HostEvent.LOAD)


def test_the_page_has_the_phases_as_users_see_them() -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| ([a-z]*) ?\| [a-z]", PAGE, re.MULTILINE)
    hidden = (M.REMOVED, M.PROPOSED)
    assert rows == [
        (phase.name, "" if phase in hidden else Availability(phase).state.value)
        for phase in ModelPhase
    ]
