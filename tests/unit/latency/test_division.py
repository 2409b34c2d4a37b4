"""What vLLM's tensor parallelism can divide."""

from __future__ import annotations

import pytest

from gpupoold.latency.shape import held_kv_heads, why_undivided


@pytest.mark.parametrize(
    ("degree", "dimensions", "said"),
    [
        (1, {"num_heads": 7, "num_kv_heads": 7, "width": 13, "vocab_size": 5}, ""),
        (4, {"num_heads": 64, "num_kv_heads": 8, "width": 29568, "vocab_size": 152064}, ""),
        (8, {"num_heads": 28}, "28 attention heads are not divisible by 8"),
        (8, {"num_heads": 32, "num_kv_heads": 2}, ""),
        (6, {"num_heads": 12, "num_kv_heads": 4}, "4 KV heads neither divide 6 nor are divisible"),
        (4, {"num_heads": 12, "num_kv_heads": 6}, "6 KV heads neither divide 4 nor are divisible"),
        (4, {"width": 10922}, "the feed-forward width of 10922 is not divisible by 4"),
        (8, {"vocab_size": 50257}, ""),
        (5, {"vocab_size": 50257}, "the padded vocabulary of 50304 is not divisible by 5"),
        (8, {}, ""),
    ],
)
def test_why_undivided(degree: int, dimensions: dict[str, int], said: str) -> None:
    found = why_undivided(degree, **dimensions)
    assert found.startswith(said) if said else found == ""


def test_fewer_kv_heads_than_gpus_are_copied() -> None:
    assert [held_kv_heads(2, degree) for degree in (1, 2, 4, 8)] == [2, 2, 4, 8]
