"""More work never takes less time, and scaling is its own inverse."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpupoold.latency.profiles import (
    MeasuredProfile,
    distance,
    latency_for,
    measured_profiles,
    scale_decode,
    scale_prefill,
)
from gpupoold.latency.shape import builtin_shape, builtin_shapes, hardware, hardware_profiles

gpus = st.sampled_from(sorted(hardware_profiles()))
models = st.sampled_from(sorted(builtin_shapes()))
lengths = st.integers(1, 200_000)


@given(gpus, models, st.lists(lengths, min_size=1, max_size=8), lengths)
def test_another_prompt_or_a_longer_one_takes_longer(
    gpu: str, model: str, prompts: list[int], more: int
) -> None:
    latency = latency_for(gpu, builtin_shape(model))
    assert latency.prefill_s([*prompts, more]) > latency.prefill_s(prompts) > 0
    assert latency.prefill_s([prompts[0] + more, *prompts[1:]]) > latency.prefill_s(prompts)


@given(gpus, models, st.integers(1, 500), st.integers(1, 10**7), st.integers(1, 10**6))
def test_more_context_or_a_larger_batch_takes_longer(
    gpu: str, model: str, batch_size: int, context: int, more: int
) -> None:
    latency = latency_for(gpu, builtin_shape(model))
    step_s = latency.decode_step_s(batch_size, context)
    assert latency.decode_step_s(batch_size, context + more) > step_s > 0
    assert latency.decode_step_s(batch_size + 1, context) > step_s


@given(gpus, models, st.integers(0, 10**12), st.integers(0, 10**12))
def test_switch_is_additive_and_free_for_nothing(gpu: str, model: str, one: int, two: int) -> None:
    latency = latency_for(gpu, builtin_shape(model))
    assert latency.switch_s(0) == 0
    assert latency.switch_s(one + two) == pytest.approx(
        latency.switch_s(one) + latency.switch_s(two)
    )


@given(st.sampled_from(measured_profiles()), gpus, models)
def test_scaling_there_and_back_changes_nothing(
    profile: MeasuredProfile, gpu: str, model: str
) -> None:
    from_shape, from_gpu = profile.shape, hardware(profile.gpu)
    to = builtin_shape(model), hardware(gpu)
    prefill = profile.prefill.law
    decode = profile.decode.law
    there = scale_prefill(prefill, from_shape, from_gpu, *to)
    back = scale_prefill(there, *to, from_shape, from_gpu)
    assert back.constants == pytest.approx(prefill.constants)
    there_decode = scale_decode(decode, from_shape, from_gpu, *to)
    back_decode = scale_decode(there_decode, *to, from_shape, from_gpu)
    assert back_decode.constants == pytest.approx(decode.constants)


@given(gpus, models, gpus, models)
def test_distance_is_symmetric_and_zero_only_between_equals(
    gpu: str, model: str, other_gpu: str, other_model: str
) -> None:
    one = builtin_shape(model), hardware(gpu)
    other = builtin_shape(other_model), hardware(other_gpu)
    assert distance(*one, *other) == pytest.approx(distance(*other, *one), abs=1e-12)
    assert distance(*one, *one) == 0
