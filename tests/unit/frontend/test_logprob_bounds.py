"""Bounds on the log-probabilities of one HTTP request."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from gpupoold.frontend.request_context import (
    MAX_ENTRIES,
    MAX_ENTRIES_AT_ONCE,
    BytesInFlight,
    RequestTally,
    counts,
)
from gpupoold.frontend.vllm_bounds import (
    BYTES_PER_ENTRY,
    WantedEntries,
    count_entries,
    limit_beams,
    wanted_entries,
)


def counting_logprobs(
    has_limit: bool, max_entries: int = MAX_ENTRIES
) -> AbstractContextManager[None]:
    return counts.holding(RequestTally(1, 1, asyncio.Semaphore(), has_limit, max_entries))


def params(**fields: Any) -> Any:
    none = {"logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None, "n": 1}
    return SimpleNamespace(**none | fields)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, WantedEntries(0, 0)),
        ({"logprobs": 0}, WantedEntries(0, 1)),
        ({"logprobs": 20}, WantedEntries(0, 21)),
        ({"logprobs": -1}, WantedEntries(0, 32_001)),
        ({"logprob_token_ids": [1] * 128}, WantedEntries(0, 129)),
        ({"logprob_token_ids": [1] * 3, "logprobs": 20}, WantedEntries(0, 21)),
        ({"prompt_logprobs": 0}, WantedEntries(1000, 0)),
        ({"prompt_logprobs": 20, "logprobs": 5}, WantedEntries(21_000, 6)),
        ({"prompt_logprobs": -1, "n": 2}, WantedEntries(2 * 32_001_000, 0)),
        ({"prompt_logprobs": 1, "logprobs": 1, "n": 8}, WantedEntries(16_000, 16)),
    ],
)
def test_entries_of_a_request(fields: dict[str, Any], wanted: WantedEntries) -> None:
    assert wanted_entries(params(**fields), 1000, 32_000) == wanted


def test_a_beam_search_gets_twice_its_width() -> None:
    serving = SimpleNamespace(beam_search=lambda prompt, request_id, params: params.max_tokens)
    limit_beams(SimpleNamespace(openai_serving_chat=serving))
    with counting_logprobs(False):
        beams = SimpleNamespace(beam_width=4, max_tokens=131_072)
        assert serving.beam_search(None, "r", beams) == MAX_ENTRIES // 36


def test_prompts_of_one_request_count_together() -> None:
    each = wanted_entries(params(prompt_logprobs=20), 1000, 32_000)
    with counting_logprobs(True):
        for _ in range(MAX_ENTRIES // 21_000):
            assert count_entries(each, 1, is_stream=False) == 1
        with pytest.raises(VLLMValidationError, match=r"105,000 log-prob.* more than 100,000"):
            count_entries(each, 1, is_stream=False)


@pytest.mark.parametrize("named", ["`logprobs`", "`prompt_logprobs`", "`logprob_token_ids`"])
def test_the_refusal_names_the_fields(named: str) -> None:
    with counting_logprobs(True), pytest.raises(VLLMValidationError, match=named):
        count_entries(WantedEntries(0, 21), 5_000, is_stream=False)


def test_the_largest_request_and_one_more() -> None:
    with counting_logprobs(True):
        assert count_entries(WantedEntries(0, 10), 10_000, is_stream=False) == 10_000
    with counting_logprobs(True), pytest.raises(VLLMValidationError):
        count_entries(WantedEntries(0, 10), 10_001, is_stream=False)


def test_without_a_limit_of_its_own_an_answer_is_as_long_as_fits() -> None:
    with counting_logprobs(False):
        assert count_entries(WantedEntries(10_000, 20), 131_072, is_stream=False) == 4_500
        with pytest.raises(VLLMValidationError):
            count_entries(WantedEntries(0, 20), 131_072, is_stream=False)
    with counting_logprobs(False):
        assert count_entries(WantedEntries(0, 0), 131_072, is_stream=False) == 131_072


def test_what_is_made_at_once_is_bounded_lower() -> None:
    with (
        counting_logprobs(True, MAX_ENTRIES_AT_ONCE),
        pytest.raises(VLLMValidationError, match="25,000"),
    ):
        count_entries(WantedEntries(0, 21), 2_000, is_stream=True)
    prompt = WantedEntries(MAX_ENTRIES_AT_ONCE + 1, 1)
    with counting_logprobs(True):
        assert count_entries(prompt, 1, is_stream=False) == 1
    with counting_logprobs(True), pytest.raises(VLLMValidationError, match="25,000"):
        count_entries(prompt, 1, is_stream=True)


def test_entries_are_charged_before_work_begins() -> None:
    room = BytesInFlight(10_000 * BYTES_PER_ENTRY)
    with room.holding(""), counting_logprobs(True):
        count_entries(WantedEntries(0, 20), 400, is_stream=False)
        assert room.num_bytes == 8_000 * BYTES_PER_ENTRY
        with room.holding(""), counting_logprobs(True), pytest.raises(VLLMValidationError):
            count_entries(WantedEntries(0, 20), 400, is_stream=False)
    assert room.num_bytes == 0
