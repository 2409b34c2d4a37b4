"""Bounds on the work for each token, with vLLM's real parameters."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from gpupoold.frontend.request_context import why_too_much_work


def detection(size: int, count: int) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(max_pattern_size=size, min_count=count)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("logit_bias", dict.fromkeys(range(16_384), 1.0), dict.fromkeys(range(16_385), 1.0)),
        ("stop_token_ids", list(range(16_384)), list(range(16_385))),
        ("stop", ["a"] * 4_096, ["a"] * 4_097),
        ("bad_words", [str(one) for one in range(1_024)], [str(one) for one in range(1_025)]),
        ("repetition_detection", detection(256, 2), detection(257, 2)),
        ("repetition_detection", detection(64, 32), detection(64, 33)),
    ],
)
def test_bound(field: str, most: Any, more: Any) -> None:
    assert why_too_much_work(SamplingParams(**{field: most})) is None
    found = why_too_much_work(SamplingParams(**{field: more}))
    assert found is not None
    assert found[0] == field
    assert found[1].startswith(f"`{field}` has ")
    assert "the bound is " in found[1]
    twice = why_too_much_work(SamplingParams(n=2, **{field: most}))
    assert twice is not None
    assert "for each of 2 answers" in twice[1]
    prompts = why_too_much_work(SamplingParams(n=2, **{field: most}), num_prompts=256)
    assert prompts is not None
    assert "for each of 512 answers" in prompts[1]


def test_ordinary_requests_of_many_prompts() -> None:
    """OpenAI takes 4 stop strings and 300 biases."""
    ordinary = SamplingParams(stop=["a"] * 4, logit_bias=dict.fromkeys(range(300), 1.0))
    assert why_too_much_work(ordinary, num_prompts=50) is None
    assert why_too_much_work(SamplingParams(stop=["a"] * 4), num_prompts=512) is None


def test_one_string_and_nothing() -> None:
    assert why_too_much_work(SamplingParams(n=64, stop="a" * 2_000)) is None
    assert why_too_much_work(SamplingParams()) is None
    assert why_too_much_work(PoolingParams()) is None
