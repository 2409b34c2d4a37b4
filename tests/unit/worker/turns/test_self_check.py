"""Answers to self-checks, and which are equal."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

import torch

from gpupoold.worker.turns.self_check import is_same_answer, sample_of


def test_tokens_must_be_equal() -> None:
    assert is_same_answer((1, 2), (1, 2), generates=True)
    assert not is_same_answer((1000, 2), (1001, 2), generates=True)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ((1_000_000, -500_000, 3), True),
        ((1_019_000, -481_000, -19_000), True),  # the kernels of another device
        ((1_000_000, -470_000, 3), False),
        ((1_000_000, -500_000), False),
        ((), False),
    ],
)
def test_numbers_may_differ_a_little(other: tuple[int, ...], is_same: bool) -> None:
    expected = (1_000_000, -500_000, 3)
    assert is_same_answer(expected, other, generates=False) == is_same


def test_a_result_is_sampled_evenly() -> None:
    assert sample_of(torch.tensor([0.5, -0.25])) == (500_000, -250_000)
    sample = sample_of(torch.arange(64_000).reshape(64, 1000) / 1e6)
    assert sample == tuple(range(0, 64_000, 1000))
    assert len(sample_of(torch.zeros(100))) == 64
    assert sample_of(torch.tensor([float("nan"), float("inf"), -1e30])) == (0, 10**15, -(10**15))
