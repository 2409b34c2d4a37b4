"""One step's outputs, divided among the frontends whose requests they are of."""

from __future__ import annotations

from gpupoold.control.live_requests import parts_of
from gpupoold.wire import messages as m

FRONTENDS = {"a": 0, "b": 1, "c": 1}


def progress(*request_ids: str) -> list[m.RequestProgress]:
    return [m.RequestProgress(one, [7]) for one in request_ids]


def test_outputs_of_one_frontend_are_passed_on_as_they_are() -> None:
    outputs = m.StepOutputs("m", 1.0, [b"x"], progress("b", "c"), 0.5, {1: 1})
    parts = parts_of(outputs, FRONTENDS.get)
    assert list(parts) == [1]
    assert parts[1] is outputs


def test_frames_go_to_whom_the_engine_made_them_for() -> None:
    outputs = m.StepOutputs(
        "m", 1.0, [b"1", b"2", b"3"], progress("a", "b", "c"), 0.5, {1: 2, 0: 1}
    )
    assert parts_of(outputs, FRONTENDS.get) == {
        0: m.StepOutputs("m", 1.0, [b"3"], progress("a"), 0.5),
        1: m.StepOutputs("m", 1.0, [b"1", b"2"], progress("b", "c"), 0.5),
    }


def test_outputs_of_requests_that_have_ended_are_nobody_s() -> None:
    outputs = m.StepOutputs("m", 1.0, [b"1", b"2"], progress("gone", "b"), None, {0: 1, 1: 1})
    assert parts_of(outputs, FRONTENDS.get) == {1: m.StepOutputs("m", 1.0, [b"2"], progress("b"))}
    assert parts_of(outputs, lambda _: None) == {}


def test_tokens_without_an_engine_are_divided_too() -> None:
    outputs = m.StepOutputs("m", 1.0, [], progress("a", "b", "c"))
    assert parts_of(outputs, FRONTENDS.get) == {
        0: m.StepOutputs("m", 1.0, [], progress("a")),
        1: m.StepOutputs("m", 1.0, [], progress("b", "c")),
    }
