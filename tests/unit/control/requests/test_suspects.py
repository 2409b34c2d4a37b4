"""Who is suspected, tried alone, cleared or convicted."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.processes.supervised import NOBODY, Candidates
from gpupoold.control.requests.core_shell import PASSED_TOKENS, Suspects
from tests.unit.control.live import live_request


class Trials:
    """The suspects, and the requests that they are, by id."""

    def __init__(self) -> None:
        self._suspects = Suspects()
        self._requests: dict[str, LiveRequest] = {}

    def crashed(self, candidates: Candidates, num_tokens_of: Mapping[str, int]) -> list[str]:
        """A worker with these requests crashes; ids of the convicted."""
        lost = [self._with(name, num_tokens) for name, num_tokens in num_tokens_of.items()]
        return [one.request_id for one in self._suspects.crashed(candidates, lost)]

    def progressed(self, request_id: str, num_tokens: int) -> bool:
        return self._suspects.progressed(self._with(request_id, num_tokens))

    def next_trial(self, now_s: float) -> str | None:
        request = self._suspects.next_trial(now_s)
        return None if request is None else request.request_id

    def take_attributed(self) -> list[str]:
        return self._suspects.take_attributed()

    def ended(self, request_id: str) -> None:
        self._suspects.ended(self._requests.pop(request_id))

    def is_held(self, request_id: str) -> bool:
        return self._requests[request_id].is_held

    def is_isolated(self, request_id: str) -> bool:
        return self._requests[request_id].is_isolated

    def _with(self, request_id: str, num_tokens: int) -> LiveRequest:
        request = self._requests.setdefault(request_id, live_request(request_id))
        request.output_token_ids = [0] * num_tokens
        return request


@pytest.fixture
def suspects() -> Trials:
    return Trials()


def due_to(*ids: str, models: tuple[str, ...] = (), has_unknown: bool = False) -> Candidates:
    return Candidates(frozenset(ids), frozenset(models), has_unknown)


THREE = {"a": 5, "b": 0, "c": 9}


def test_candidates_are_held_and_others_are_not(suspects: Trials) -> None:
    assert suspects.crashed(due_to("a", "b"), THREE) == []
    assert [one for one in THREE if suspects.is_held(one)] == ["a", "b"]
    assert not suspects.is_isolated("c")


def test_one_is_tried_after_the_other(suspects: Trials) -> None:
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


def test_who_is_tried_for_long_lets_others_go_on(suspects: Trials) -> None:
    suspects.crashed(due_to("a", "b"), THREE)
    assert suspects.next_trial(0.0) == "a"
    assert suspects.next_trial(9.9) is None
    assert suspects.next_trial(10.0) == "b"


def test_a_crash_alone_convicts(suspects: Trials) -> None:
    suspects.crashed(due_to("a", "b"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(due_to("a"), {"a": 5, "d": 3}) == ["a"]
    assert not suspects.is_held("a")
    assert not suspects.is_held("d")
    assert suspects.next_trial(0.1) == "b"


def test_the_first_crash_never_convicts(suspects: Trials) -> None:
    assert suspects.crashed(due_to("a"), THREE) == []
    assert suspects.is_held("a")


def test_a_crash_that_may_be_due_to_others_convicts_nobody(suspects: Trials) -> None:
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


def test_who_is_tried_when_another_crashes_the_worker(suspects: Trials) -> None:
    suspects.crashed(due_to("a"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(due_to("d"), {"a": 5, "d": 0}) == []
    assert suspects.next_trial(1.0) == "a"
    assert suspects.progressed("a", 100)
    assert suspects.next_trial(2.0) == "d"


def test_a_death_that_is_nobodys_fault(suspects: Trials) -> None:
    suspects.crashed(due_to("a"), THREE)
    suspects.next_trial(0.0)
    assert suspects.crashed(NOBODY, THREE) == []
    assert suspects.next_trial(0.0) == "a", "it is tried anew"


def test_who_is_suspected_twice_stays_alone(suspects: Trials) -> None:
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


def test_a_model_is_charged_when_all_requests_are_cleared(suspects: Trials) -> None:
    suspects.crashed(due_to("a", "b", models=("llama",)), THREE)
    for request_id in ("a", "b"):
        assert suspects.take_attributed() == []
        suspects.next_trial(0.0)
        suspects.progressed(request_id, 50)
    assert suspects.take_attributed() == ["llama"]
    assert suspects.take_attributed() == []


def test_a_model_is_not_charged_when_a_request_is_convicted(suspects: Trials) -> None:
    suspects.crashed(due_to("a", "b", models=("llama",)), THREE)
    suspects.next_trial(0.0)
    suspects.crashed(due_to("a"), {"a": 5})
    suspects.next_trial(1.0)
    suspects.progressed("b", 50)
    assert suspects.take_attributed() == []
