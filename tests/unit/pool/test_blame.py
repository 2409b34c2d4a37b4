"""Which deaths are whose fault, and when a model has caused too many."""

from __future__ import annotations

import signal

import pytest

from gpupoold.pool.blame import QUARANTINE_WINDOW_S, Blame, Death, death_of
from gpupoold.process import OUT_OF_MEMORY_STATUS

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
        (0, "exit status 0", False),
        (None, "it left, and its exit status is not known", False),
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


def test_the_second_death_in_time_convicts() -> None:
    blame = Blame()
    assert blame.charge("llama", 0, CRASH, 100.0) is None
    assert blame.reason("llama") is None
    reason = blame.charge("llama", 0, CRASH, 100.0 + QUARANTINE_WINDOW_S - 1)
    assert reason == blame.reason("llama") == "ended the worker of device 0 twice: signal 11"
    assert blame.charge("llama", 0, CRASH, 800.0) is None, "it is in quarantine already"


def test_deaths_on_different_devices_count_together() -> None:
    blame = Blame()
    blame.charge("llama", 3, CRASH, 1.0)
    reason = blame.charge("llama", 1, Death("out of memory", True), 2.0)
    assert reason == "ended the workers of devices 1 and 3: out of memory"


def test_deaths_far_apart_and_of_others_do_not() -> None:
    blame = Blame()
    for at_s in (0.0, QUARANTINE_WINDOW_S, 2 * QUARANTINE_WINDOW_S):
        assert blame.charge("llama", 0, CRASH, at_s) is None
    assert blame.charge("qwen", 0, CRASH, 2 * QUARANTINE_WINDOW_S) is None


def test_who_is_forgiven_has_two_again() -> None:
    blame = Blame()
    for at_s in (1.0, 2.0):
        blame.charge("llama", 0, CRASH, at_s)
    blame.forgive("llama")
    assert blame.reason("llama") is None
    assert blame.charge("llama", 0, CRASH, 3.0) is None
    assert blame.charge("llama", 0, CRASH, 4.0) is not None
    blame.forgive("never seen")
