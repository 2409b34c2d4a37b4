"""Bounds on the work for each token, with vLLM's real parameters."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from gpupoold.frontend.token_work import why_too_much_work


def detection(size: int, count: int) -> RepetitionDetectionParams:
    return RepetitionDetectionParams(max_pattern_size=size, min_count=count)


@pytest.mark.parametrize(
    ("field", "most", "more"),
    [
        ("logit_bias", dict.fromkeys(range(16_384), 1.0), dict.fromkeys(range(16_385), 1.0)),
        ("stop_token_ids", list(range(4_096)), list(range(4_097))),
        ("stop", ["a"] * 1_024, ["a"] * 1_025),
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
    assert "times `n` = 2" in twice[1]


def test_one_string_and_nothing() -> None:
    assert why_too_much_work(SamplingParams(n=64, stop="a" * 2_000)) is None
    assert why_too_much_work(SamplingParams()) is None
    assert why_too_much_work(PoolingParams()) is None
