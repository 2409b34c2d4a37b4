"""Which deaths are the worker's own fault, and what they can be due to."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from gpupoold.control.processes.supervised import (
    NOBODY,
    Candidates,
    Death,
    candidates_of,
    death_of,
)
from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.system.process import OUT_OF_DEVICE_MEMORY_STATUS, OUT_OF_MEMORY_STATUS

CRASH = Death("signal 11", True)


@pytest.mark.parametrize(
    ("status", "reason", "is_at_fault"),
    [
        (-signal.SIGSEGV, "signal 11", True),
        (-signal.SIGBUS, "signal 7", True),
        (-signal.SIGABRT, "signal 6", True),
        (-signal.SIGFPE, "signal 8", True),
        (-signal.SIGILL, "signal 4", True),
        (-signal.SIGKILL, "signal 9", False),
        (-signal.SIGTERM, "signal 15", False),
        (-signal.SIGHUP, "signal 1", False),
        (1, "exit status 1", True),
        (OUT_OF_MEMORY_STATUS, "out of memory", True),
        (OUT_OF_DEVICE_MEMORY_STATUS, "out of device memory", True),
        (0, "exit status 0", False),
        (None, "exit status unknown", False),
    ],
)
def test_a_status_tells_the_fault(status: int | None, reason: str, is_at_fault: bool) -> None:
    assert death_of(status) == Death(reason, is_at_fault)


def test_what_the_daemon_killed_for_a_reason() -> None:
    assert death_of(-signal.SIGKILL, "hung: no step") == Death("hung: no step", True)
    assert death_of(None, "hung: no step") == Death("hung: no step", True)


def test_what_the_kernel_killed_for_memory() -> None:
    death = death_of(-signal.SIGKILL, saw_oom_kill=True)
    assert death == Death("out of memory: killed by the kernel", True)
    assert death_of(-signal.SIGTERM, saw_oom_kill=True).is_at_fault is False
    assert death_of(-signal.SIGSEGV, saw_oom_kill=True) == CRASH


def step(model: str, *ids: str) -> Activity:
    return Activity(ThreadPhase.STEP, model, frozenset(map(digest, ids)))


def crash(*activities: Activity) -> Death:
    return Death("signal 11", True, activities)


MODEL_OF = {"a": "llama", "b": "llama", "c": "qwen"}


def test_a_crash_in_a_step_is_due_to_one_of_its_requests() -> None:
    found = candidates_of(crash(step("llama", "a", "b")), MODEL_OF)
    assert found == Candidates(frozenset({"a", "b"}))
    assert (found.only_request, found.only_model) == (None, None)
    assert candidates_of(crash(step("llama", "b", "gone")), MODEL_OF).only_request == "b"


def test_a_step_whose_requests_are_not_known_can_be_any_of_the_models() -> None:
    found = candidates_of(crash(Activity(ThreadPhase.STEP, "llama", None)), MODEL_OF)
    assert found.requests == {"a", "b"}


@pytest.mark.parametrize(
    "phase", [ThreadPhase.LOAD, ThreadPhase.SWITCH, ThreadPhase.SELF_CHECK, ThreadPhase.PROFILE]
)
def test_a_crash_while_the_model_is_made_ready_is_the_models(phase: ThreadPhase) -> None:
    copying = Activity(ThreadPhase.COPY, "")
    found = candidates_of(crash(Activity(phase, "llama"), copying), MODEL_OF)
    assert found.only_model == "llama"
    assert not found.requests


def test_a_grammar_beside_a_step_is_as_suspect_as_the_step() -> None:
    grammar = Activity(ThreadPhase.GRAMMAR, "qwen", frozenset({digest("c")}))
    found = candidates_of(crash(step("llama", "a"), grammar), MODEL_OF)
    assert found.requests == {"a", "c"}
    assert found.only_request is None


def test_copies_beside_a_step_leave_doubt() -> None:
    assert candidates_of(crash(step("llama", "a"), Activity(ThreadPhase.COPY, "")), MODEL_OF) == (
        Candidates(frozenset({"a"}), has_unknown=True)
    )


def test_nobody_is_a_candidate() -> None:
    assert candidates_of(crash(), MODEL_OF) == NOBODY
    killed = Death("signal 9", False, (step("llama", "a"),))
    assert candidates_of(killed, MODEL_OF) == NOBODY
    # Requests of the model's own: its self-check, or the timing of its steps.
    assert candidates_of(crash(step("llama", "self-check")), MODEL_OF) == NOBODY


def test_broken_hardware_makes_nobody_a_candidate() -> None:
    broken = replace(
        crash(step("llama", "a"), Activity(ThreadPhase.LOAD, "qwen")), is_of_device=True
    )
    assert candidates_of(broken, MODEL_OF) == NOBODY


def test_what_the_worker_did_in_words() -> None:
    assert crash().doing == ""
    assert crash(step("llama", "a", "b")).doing == "a step of llama with 2 requests"
    grammar = Activity(ThreadPhase.GRAMMAR, "qwen", frozenset({digest("c")}))
    both = crash(step("llama", "a"), grammar)
    assert both.doing == "a step of llama with 1 request and compiling a grammar for qwen"
    assert crash(Activity(ThreadPhase.LOAD, "llama")).doing == "the load of llama"
