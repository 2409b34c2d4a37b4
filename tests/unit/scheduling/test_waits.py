"""Places and waiting times of requests without a token."""

from __future__ import annotations

import pytest

from gpupoold.domain import Priority, Targets
from gpupoold.scheduling.wait_estimate import lines_of, next_token_in_s, waits_of
from tests.property.core_box import Box


@pytest.fixture
def box() -> Box:
    made = Box("gpupool", 1)
    made.up(0)
    for model in ("a", "b"):
        made.add_model(model, Targets(5.0, 0.1))
        made.host(0, model)
    for number in range(12):
        made.arrive("ab"[number % 2], 1000 + number, 5, 0.0, Priority.NORMAL)
    return made


def test_places_are_by_arrival_on_the_device(box: Box) -> None:
    ids = list(box.state.requests)
    lines = lines_of(box.state, ids)
    assert len(lines) == 2
    found = {id_: wait for line in lines for id_, wait in waits_of(box.state, line, box.now_s)}
    assert [found[one].place for one in ids] == list(range(1, 13))


def test_the_first_and_the_last_of_a_line_have_the_estimates_of_the_core(box: Box) -> None:
    [line] = lines_of(box.state, [next(iter(box.state.requests))])
    waits = dict(waits_of(box.state, line, box.now_s))
    estimates = [waits[one.id].first_token_in_s for one in line.requests]
    assert all(one is not None and one >= 0 for one in estimates)
    for index in (0, -1):
        expected = next_token_in_s(box.state, line.requests[index], box.now_s)
        assert estimates[index] == expected
    assert estimates == sorted(estimates)  # type: ignore[type-var]


def test_a_request_that_has_ended_meanwhile_is_left_out(box: Box) -> None:
    [line] = lines_of(box.state, [next(iter(box.state.requests))])
    ended = line.requests[0].id
    box.cancel(ended)
    box.hear_all()
    assert ended not in dict(waits_of(box.state, line, box.now_s))


def test_lines_without_a_wanted_request_cost_nothing(box: Box) -> None:
    assert lines_of(box.state, ["unknown"]) == []
