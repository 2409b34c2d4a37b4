"""What the demo reports, and when the demo fails."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from examples.demo import act_two
from examples.demo.act_two import ELSEWHERE, ON_KILLED, Kill
from examples.demo.answers import Answer
from gpupoold.api.schemas import RequestInfo
from gpupoold.frontend.request_context import RequestIds


def answer(stream_id: str) -> Answer:
    tokens = list(range(act_two.NUM_TOKENS))
    return Answer("m", "p", 0.0, stream_id, tokens, [float(token) for token in tokens])


def live(request_id: str) -> RequestInfo:
    return RequestInfo(
        request_id=request_id,
        model="m",
        device=0,
        age_s=1.0,
        num_prompt_tokens=1,
        num_output_tokens=1,
        next_deadline_in_s=1.0,
    )


def report(request_ids: list[str], seen: list[str]) -> tuple[bool, str, dict[str, int]]:
    """Return whether the demo is content, its words, and the answers by place."""
    answers = [answer(stream_id) for stream_id in seen]
    kill = Kill(0, 4711, 100.5, [live(one) for one in request_ids], 1.5)
    found = act_two.summarise(answers, answers, kill)
    printed = io.StringIO()
    is_good = act_two.report(Console(file=printed, width=100), found)
    return is_good, printed.getvalue(), {k: v["requests"] for k, v in found["answers"].items()}


def test_the_answers_on_the_killed_process_are_counted() -> None:
    http_ids = [RequestIds().http_id for _ in range(3)]
    is_good, printed, counts = report(http_ids[:2], [f"chatcmpl-{one}" for one in http_ids])
    assert is_good
    assert counts == {ON_KILLED: 2, ELSEWHERE: 1}
    assert "3 of 3 answers complete; 0 tokens differ" in printed


def test_pauses_from_the_kill_on() -> None:
    late = Answer("m", "p", 0.0, "x", [1] * 5, [0.0, 1.0, 4.0, 5.0, 7.0])
    found = act_two.longest_pauses([(answer("y"), late)], killed_s=2.0)
    assert found == {"requests": 1, "without_kill_s": 1.0, "from_kill_s": 3.0}
    found = act_two.longest_pauses([(answer("y"), late)], killed_s=4.5)
    assert found["from_kill_s"] == 2.0


@pytest.mark.parametrize("running", [[], [RequestIds().http_id]])
def test_a_kill_that_hits_no_answer_fails_the_demo(running: list[str]) -> None:
    is_good, printed, counts = report(running, [f"chatcmpl-{RequestIds().http_id}"])
    assert not is_good
    assert counts[ON_KILLED] == 0
    assert "No answer was in progress on the killed process" in printed
