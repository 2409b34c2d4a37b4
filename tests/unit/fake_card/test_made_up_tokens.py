"""Tokens on the fake card: those of a text follow from its beginning and the place alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def synthetic() -> Iterator[Any]:
    """The module that Python imports at its start on the fake card."""
    finders = list(sys.meta_path)
    from tests.fake_card.path import sitecustomize

    yield sitecustomize
    sys.meta_path[:] = finders


def test_tokens_vary_by_prompt_and_place(synthetic: Any) -> None:
    texts = [
        [synthetic.made_up([seed, 2, 3], place) for place in range(3, 60)] for seed in range(9)
    ]
    assert all(len({*text}) == len(text) for text in texts)
    assert len({tuple(text) for text in texts}) == len(texts)


def test_a_prompt_that_goes_on_with_an_answer_goes_on_as_the_answer(synthetic: Any) -> None:
    prompt = list(range(20))
    assert synthetic.made_up([*prompt, 5, 6], 22) == synthetic.made_up(prompt, 22)


def test_requests_get_a_token_when_all_theirs_are_computed(synthetic: Any) -> None:
    """Not while a prompt is computed in pieces, and none that is gone already."""

    known_requests = {
        "whole": SimpleNamespace(prompt_token_ids=[1, 2], num_tokens=2),
        "half": SimpleNamespace(prompt_token_ids=[1] * 8, num_tokens=8),
        "later": SimpleNamespace(prompt_token_ids=[1, 2], num_tokens=9),
    }

    class Scheduler:
        requests = known_requests

        def update_from_output(self, scheduled: Any, output: Any) -> list[list[int]]:
            found: list[list[int]] = output.sampled_token_ids
            return found

    synthetic._patch_scheduler(SimpleNamespace(Scheduler=Scheduler))
    before = {"whole": 0, "half": 0, "gone": 0, "later": 8}
    new = [SimpleNamespace(req_id=n, num_computed_tokens=before[n]) for n in ("whole", "half")]
    known = SimpleNamespace(req_ids=["gone", "later"], num_computed_tokens=[0, 8])
    scheduled = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=known,
        num_scheduled_tokens={"whole": 2, "half": 4, "gone": 1, "later": 1},
    )
    output = SimpleNamespace(
        sampled_token_ids=[[0], [0], [0], [0]],
        req_id_to_index={"later": 0, "whole": 1, "gone": 2, "half": 3},
    )
    expected = [[synthetic.made_up([1, 2], 9)], [synthetic.made_up([1, 2], 2)], [], []]
    assert Scheduler().update_from_output(scheduled, output) == expected
