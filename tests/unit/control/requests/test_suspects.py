"""Who is suspected, tried alone, cleared or convicted."""

from __future__ import annotations

import pytest

from gpupoold.control.processes.crash_attribution import NOBODY, Candidates
from gpupoold.control.requests.suspects import PASSED_TOKENS, Suspects


@pytest.fixture
def suspects() -> Suspects:
    return Suspects()


def due_to(*ids: str, models: tuple[str, ...] = (), has_unknown: bool = False) -> Candidates:
    return Candidates(frozenset(ids), frozenset(models), has_unknown)


THREE = {"a": 5, "b": 0, "c": 9}


def test_candidates_are_held_and_others_are_not(suspects: Suspects) -> None:
    assert suspects.crashed(due_to("a", "b"), THREE) == []
    assert [one for one in THREE if suspects.is_held(one)] == ["a", "b"]
    assert not suspects.is_isolated("c")


def test_one_is_tried_after_the_other(suspects: Suspects) -> None:
    suspects.crashed(due_to("a", "b"), THREE)
    assert suspects.next_trial(0.0) == "a"
    assert suspects.is_isolated("a")
    assert suspects.next_trial(1.0) is None
    assert not suspects.progressed("a", 5 + PASSED_TOKENS - 1)
    assert suspects.progressed("a", 5 + PASSED_TOKENS)
    assert not suspects.is_isolated("a")
    assert suspects.next_trial(1.0) == "b"
    suspects.ended("b")
    assert suspects.next_trial(1.0) is None


def test_who_is_tried_for_long_lets_others_go_on(suspects: Suspects) -> None:
    suspects.crashed(due_to("a", "b"), THREE)
    assert suspects.next_trial(0.0) == "a"
    assert suspects.next_trial(9.9) is None
    assert suspects.next_trial(10.0) == "b"


def test_a_crash_alone_convicts(suspects: Suspects) -> None:
    suspects.crashed(due_to("a", "b"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(due_to("a"), {"a": 5, "d": 3}) == ["a"]
    assert not suspects.is_held("a")
    assert not suspects.is_held("d")
    assert suspects.next_trial(0.1) == "b"


def test_the_first_crash_never_convicts(suspects: Suspects) -> None:
    assert suspects.crashed(due_to("a"), THREE) == []
    assert suspects.is_held("a")


def test_a_crash_that_may_be_due_to_others_convicts_nobody(suspects: Suspects) -> None:
    suspects.crashed(due_to("a"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(due_to("a", "d"), {"a": 5, "d": 0}) == []
    assert suspects.is_held("a")
    assert suspects.is_held("d")
    assert suspects.next_trial(1.0) == "a"
    assert suspects.crashed(due_to("a", has_unknown=True), {"a": 5}) == []
    suspects.next_trial(2.0)
    # But not for ever.
    assert suspects.crashed(due_to("a", has_unknown=True), {"a": 5}) == ["a"]


def test_who_is_tried_when_another_crashes_the_worker(suspects: Suspects) -> None:
    suspects.crashed(due_to("a"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(due_to("d"), {"a": 5, "d": 0}) == []
    assert suspects.next_trial(1.0) == "a"
    assert suspects.progressed("a", 100)
    assert suspects.next_trial(2.0) == "d"


def test_a_death_that_is_nobodys_fault(suspects: Suspects) -> None:
    suspects.crashed(due_to("a"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(NOBODY, THREE) == []
    assert suspects.next_trial(0.0) == "a", "it is tried anew"


def test_who_is_suspected_twice_stays_alone(suspects: Suspects) -> None:
    """No two requests that crash only together do so again and again."""
    for _ in range(2):
        suspects.crashed(due_to("a", "b"), THREE)
        for request_id in ("a", "b"):
            assert suspects.next_trial(0.0) == request_id
            assert suspects.progressed(request_id, 50)
    assert suspects.is_isolated("a")
    assert suspects.is_isolated("b")
    assert not suspects.is_held("a")
    assert suspects.crashed(due_to("b"), {"a": 60, "b": 60}) == ["b"]


def test_a_model_is_charged_when_all_requests_are_cleared(suspects: Suspects) -> None:
    suspects.crashed(due_to("a", "b", models=("llama",)), THREE)
    for request_id in ("a", "b"):
        assert suspects.take_charges() == []
        suspects.next_trial(0.0)
        suspects.progressed(request_id, 50)
    assert suspects.take_charges() == ["llama"]
    assert suspects.take_charges() == []


def test_a_model_is_not_charged_when_a_request_is_convicted(suspects: Suspects) -> None:
    suspects.crashed(due_to("a", "b", models=("llama",)), THREE)
    suspects.next_trial(0.0)
    suspects.crashed(due_to("a"), {"a": 5})
    suspects.next_trial(1.0)
    suspects.progressed("b", 50)
    assert suspects.take_charges() == []
