"""Devices for an arrival mix, against what follows from TokenScale's table II (check C17)."""

from __future__ import annotations

import math

import pytest

from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.policies.placement import (
    convertible_prefill_velocity,
    largest_chunk_tokens,
    reserved_kv_bytes,
)
from gpupoold.scheduling.roles import (
    decode_velocity,
    decoders_load,
    network_velocity,
    prefill_velocity,
    prefillers_load,
)

CLASSES = tuple(
    RequestClass(prompt, output) for prompt in (256, 1024, 8192) for output in (100, 350, 610)
)
# Table II, tokens/s of one decoder by class: short, medium, long prompts by output.
LLAMA = dict(zip(CLASSES, (23535, 8146, 5138, 33106, 9794, 5766, 39551, 11310, 6495), strict=True))
QWEN = dict(zip(CLASSES, (17500, 8401, 6667, 24917, 12536, 8812, 24044, 11547, 9128), strict=True))
PREFILL_VELOCITY = 14_000.0  # table I
TOTAL_RPS = 22.0
ALL_MEDIUM = {RequestClass(1024, 350): TOTAL_RPS}
UNIFORM = dict.fromkeys(CLASSES, TOTAL_RPS / 9)


def prefill_token_rate(rates_rps: dict[RequestClass, float]) -> float:
    """Prompt tokens per second (lambda in equation 2)."""
    return sum(rate * kind.num_prompt_tokens for kind, rate in rates_rps.items())


def test_c17_decoders_for_medium_requests() -> None:
    assert decoders_load(ALL_MEDIUM, LLAMA) == pytest.approx(30_228 / 9794, rel=1e-12)
    assert round(decoders_load(ALL_MEDIUM, LLAMA), 2) == 3.09
    assert math.ceil(decoders_load(ALL_MEDIUM, LLAMA)) == 4


@pytest.mark.parametrize(("velocities", "load", "num"), [(LLAMA, 7.42, 8), (QWEN, 6.38, 7)])
def test_c17_decoders_for_a_uniform_mix(
    velocities: dict[RequestClass, float], load: float, num: int
) -> None:
    assert round(decoders_load(UNIFORM, velocities), 2) == load
    assert math.ceil(decoders_load(UNIFORM, velocities)) == num


@pytest.mark.parametrize(("mix", "load", "num"), [(ALL_MEDIUM, 1.61, 2), (UNIFORM, 4.96, 5)])
def test_c17_prefillers(mix: dict[RequestClass, float], load: float, num: int) -> None:
    rate = prefill_token_rate(mix)
    assert round(prefillers_load(rate, PREFILL_VELOCITY), 2) == load
    assert math.ceil(prefillers_load(rate, PREFILL_VELOCITY)) == num


def test_c17_prompt_token_rate() -> None:
    assert prefill_token_rate(ALL_MEDIUM) == 22_528


def test_the_slower_of_prefill_and_network_counts() -> None:
    assert math.ceil(prefillers_load(20_000, 14_000, 100_000)) == 2
    assert math.ceil(prefillers_load(20_000, 14_000, 5_000)) == 4


def test_network_velocity() -> None:
    """200 Gbit/s and 128 KiB a token, as Llama-3.1-8B in 16 bits: far above prefill."""
    assert network_velocity(25e9, 131_072) == pytest.approx(190_734.86, abs=0.01)


def test_measured_prefill_velocity() -> None:
    assert prefill_velocity(28_000, 2.0) == 14_000


def test_estimated_decode_velocity() -> None:
    """120 requests of 100 + 100 tokens in 18 000 tokens of KV, each for 10 s: 12 a second."""
    assert decode_velocity(RequestClass(100, 100), 18_000, 0.1) == pytest.approx(12 * 200)
    assert decode_velocity(RequestClass(100, 100), 18_000, 0.1, max_batch_size=60) == 6 * 200


@pytest.mark.parametrize("prompt_tokens", [256, 1024, 8192])
def test_estimate_explains_the_measured_llama_decoders(prompt_tokens: int) -> None:
    """Table II for Llama-3.1-8B: one step time per prompt length explains every output length.

    The measured velocities of short and long answers differ by a factor of 4.6 to 6.1. About
    150 000 tokens of KV fit beside the weights on 40 GB, and steps then take 38 to 74 ms.
    """
    implied_tbt_s = [
        decode_velocity(kind, kv_capacity_tokens=150_000, tbt_s=1.0) / velocity
        for kind, velocity in LLAMA.items()
        if kind.num_prompt_tokens == prompt_tokens
    ]
    assert max(implied_tbt_s) / min(implied_tbt_s) < 1.11
    assert all(0.038 < tbt_s < 0.075 for tbt_s in implied_tbt_s)


def step_s(num_tokens: int) -> float:
    return 0.020 + 1e-4 * num_tokens


@pytest.mark.parametrize(
    ("tbt_s", "max_tokens", "chunk"),
    [(0.1, 8192, 800), (0.1, 512, 512), (0.0201, 8192, 1), (0.02, 8192, 0), (0.1, 0, 0)],
)
def test_largest_chunk_in_time(tbt_s: float, max_tokens: int, chunk: int) -> None:
    assert largest_chunk_tokens(lambda n: round(step_s(n), 9), tbt_s, max_tokens) == chunk


def test_prefill_beside_running_answers() -> None:
    assert convertible_prefill_velocity(800, 50, 0.1) == 7_500
    assert convertible_prefill_velocity(40, 50, 0.1) == 0
    assert reserved_kv_bytes(7_500, 0.4, 131_072) == 3_000 * 131_072


@pytest.mark.parametrize(
    "call",
    [
        lambda: RequestClass(0, 1),
        lambda: prefill_velocity(1, 0),
        lambda: network_velocity(0, 1),
        lambda: network_velocity(1, 0),
        lambda: decode_velocity(RequestClass(1, 1), 0, 1),
        lambda: prefillers_load(-1, 1),
        lambda: prefillers_load(1, 0),
        lambda: prefillers_load(math.nan, 1),
        lambda: decoders_load({RequestClass(1, 1): 1.0}, {}),
        lambda: decoders_load({RequestClass(1, 1): -1.0}, {RequestClass(1, 1): 1.0}),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()
