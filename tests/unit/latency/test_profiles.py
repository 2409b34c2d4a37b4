"""The packaged fits, against some of the points they come from."""

from __future__ import annotations

import statistics
from dataclasses import replace
from importlib import resources

import pytest

from gpupoold.latency.models import DecodeBatch
from gpupoold.latency.profiles import (
    COLUMNS,
    MeasuredProfile,
    latency_for,
    measured_profiles,
    parse,
)
from gpupoold.latency.shape import DataError, LatencyError, builtin_shape, hardware
from scripts.fit_profiles import decode_floors, prefill_floors

PROFILES = measured_profiles()

# Medians in ms from MachineLearningSystem/25SOSP-Aegaeon @ 1c3b110a, aegaeon/profiles
# (Apache-2.0): GPU, model, input tokens, batch size, prefill, decode step.
RAW_POINTS = [
    ("A100", "Qwen-7B", 2048, 2, 261.994, 13.775),
    ("A100", "Qwen-7B", 512, 1, 36.734, 12.848),
    ("A100", "Qwen-7B", 64, 16, 68.454, 14.343),
    ("A100", "Qwen-7B", 16, 100, 105.204, 26.688),
    ("H100", "Qwen2.5-7B", 2048, 2, 95.811, 9.889),
    ("H100", "Qwen2.5-7B", 1024, 1, 24.948, 9.013),
    ("H100", "Qwen2.5-7B", 512, 1, 14.077, 9.142),
    ("H100", "Qwen2.5-7B", 32, 80, 58.974, 14.000),
    ("A10", "Llama-2-7B", 1024, 4, 934.105, 38.086),
    ("A10", "Llama-2-7B", 256, 1, 67.718, 31.815),
    ("A10", "Llama-2-7B", 64, 40, 540.171, 44.304),
]
TEXT = resources.files("gpupoold.latency").joinpath("measured.csv").read_text("utf-8")
PROMPTS = [(length,) * batch for length in (64, 256, 1024, 4096) for batch in (1, 4)]
DECODES = [DecodeBatch(b, b * c) for b in (1, 8, 32) for c in (64, 512, 2048)]


def name_of(profile: MeasuredProfile) -> str:
    return f"{profile.model} on {profile.num_gpus} {profile.gpu}"


@pytest.mark.parametrize(("gpu", "model", "length", "batch", "prefill_ms", "decode_ms"), RAW_POINTS)
def test_fits_agree_with_raw_points(
    gpu: str, model: str, length: int, batch: int, prefill_ms: float, decode_ms: float
) -> None:
    latency = latency_for(gpu, builtin_shape(model))
    assert not latency.is_scaled
    assert latency.prefill_s([length] * batch) * 1e3 == pytest.approx(prefill_ms, rel=0.25)
    context = batch * (length + 5)
    assert latency.decode_step_s(batch, context) * 1e3 == pytest.approx(decode_ms, rel=0.1)


@pytest.mark.parametrize("profile", PROFILES, ids=name_of)
def test_every_fit_is_good_and_has_a_source(profile: MeasuredProfile) -> None:
    least, most, worst = (0.9, 0.15, 0.35) if profile.num_gpus == 1 else (0.7, 0.2, 0.4)
    for fit in (profile.prefill, profile.decode):
        assert least < fit.quality.r_squared <= 1
        assert 0 < fit.quality.mean_relative_error <= most
        assert fit.quality.mean_relative_error < fit.quality.p90_relative_error < worst
        assert fit.quality.num_points >= 19
    repository, path = profile.source.split(" ")
    assert len(repository.split("@")[1]) == 40
    assert "/" in path
    assert profile.licence in {"Apache-2.0", "MIT"}


@pytest.mark.parametrize("profile", PROFILES, ids=name_of)
def test_attention_costs_at_least_what_the_hardware_allows(profile: MeasuredProfile) -> None:
    gpu = hardware(profile.gpu)
    almost = 1 - 1e-5  # the file has six digits
    _, least_c2, _ = prefill_floors(profile.shape, gpu, profile.num_gpus)
    least_k2, _, _ = decode_floors(profile.shape, gpu, profile.num_gpus)
    assert profile.prefill.law.c2 >= least_c2 * almost
    assert profile.decode.law.context_s >= least_k2 * almost


def test_measured_gpus() -> None:
    assert {p.gpu for p in PROFILES} == {"A10", "A100-80", "H100", "H20", "H800"}
    assert len({(p.gpu, p.model, p.num_gpus) for p in PROFILES}) == len(PROFILES) >= 25


def test_exact_pair_is_used_as_it_is() -> None:
    shape = builtin_shape("Qwen2.5-7B")
    latency = latency_for("NVIDIA H100 80GB HBM3", shape)
    packaged = next(p for p in PROFILES if (p.gpu, p.model) == ("H100", "Qwen2.5-7B"))
    assert latency.prefill == packaged.prefill.law
    assert latency.decode == packaged.decode.law
    assert latency.switch.bandwidth_bytes_per_s == 50e9
    assert not latency.is_scaled
    assert "25SOSP-Aegaeon" in latency.source


def test_a_fine_tune_with_more_vocabulary_is_the_same_pair() -> None:
    shape = builtin_shape("Qwen2.5-7B")
    bigger = replace(shape, num_parameters=shape.num_parameters + 1_000_000)
    assert latency_for("H100", bigger) == latency_for("H100", shape)


def test_half_the_bytes_per_weight_is_another_pair() -> None:
    shape = replace(builtin_shape("Qwen2.5-7B"), dtype_bytes=1)
    half, full = latency_for("H100", shape), latency_for("H100", builtin_shape("Qwen2.5-7B"))
    assert half.is_scaled
    assert half.decode_step_s(1, 100) == pytest.approx(full.decode_step_s(1, 100) / 2, rel=0.01)
    assert half.prefill_s([1024]) == full.prefill_s([1024])


@pytest.mark.parametrize("gpu", ["H200", "L40S", "RTX 4090", "A100-40"])
def test_unmeasured_gpu_is_scaled_and_says_so(gpu: str) -> None:
    latency = latency_for(gpu, builtin_shape("Llama-3.1-8B"))
    assert latency.is_scaled
    assert latency.source.startswith("scaled from ")
    # Between the slowest and the fastest GPU that was measured.
    assert 0.005 < latency.decode_step_s(1, 512) < 0.04
    assert 0.015 < latency.prefill_s([1024]) < 0.4


def test_more_bandwidth_decodes_faster() -> None:
    shape = builtin_shape("Llama-3.1-8B")
    assert latency_for("H200", shape).decode_step_s(8, 8192) < (
        latency_for("A100-40", shape).decode_step_s(8, 8192)
    )


def test_measured_bandwidth_replaces_the_profile() -> None:
    shape = builtin_shape("Llama-2-13B")
    latency = latency_for("H800", shape, bandwidth_bytes_per_s=26e9)
    assert latency.switch_s(shape.weight_bytes) == pytest.approx(1.0, rel=0.01)
    with pytest.raises(LatencyError, match="bandwidth must be positive"):
        latency_for("H800", shape, bandwidth_bytes_per_s=0.0)


def test_tensor_parallel_group_loads_over_all_its_links() -> None:
    shape = builtin_shape("Qwen-72B")
    latency = latency_for("H800", shape, num_gpus=4)
    assert latency.is_scaled
    assert "Llama-2-70B" in latency.source
    assert latency.switch.bandwidth_bytes_per_s == 4 * 50e9
    with pytest.raises(DataError, match=r"3 GPUs together: there are \[1, 2, 4, 8\]"):
        latency_for("H800", shape, num_gpus=3)


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_a_scaled_group_reads_its_weights_in_each_step(num_gpus: int) -> None:
    shape = replace(builtin_shape("Qwen-72B"), num_layers=2)
    latency = latency_for("H800", shape, num_gpus=num_gpus)
    read_s = shape.weight_bytes / (num_gpus * hardware("H800").memory_bandwidth_bytes_per_s)
    assert latency.decode_step_s(1, 1) >= read_s


def test_a_larger_group_is_faster() -> None:
    shape = builtin_shape("Qwen-72B")
    prefills = [latency_for("H800", shape, num_gpus=n).prefill_s([4096]) for n in (2, 4, 8)]
    assert prefills == sorted(prefills, reverse=True)


def test_a_group_copies_few_kv_heads() -> None:
    shape = replace(builtin_shape("Llama-3.1-8B"), num_kv_heads=2)
    assert [shape.kv_bytes_on(n) // shape.kv_bytes_per_token for n in (1, 2, 4, 8)] == [1, 1, 2, 4]


def _mean_errors(profile: MeasuredProfile, others: list[MeasuredProfile]) -> tuple[float, float]:
    guess = latency_for(profile.gpu, profile.shape, num_gpus=profile.num_gpus, candidates=others)
    prefill, decode = profile.prefill.law, profile.decode.law
    return (
        statistics.mean(
            abs(guess.prefill.predict_s(p) / prefill.predict_s(p) - 1) for p in PROMPTS
        ),
        statistics.mean(abs(guess.decode.predict_s(d) / decode.predict_s(d) - 1) for d in DECODES),
    )


@pytest.mark.parametrize(
    ("is_same_gpu", "is_group", "prefill_limit", "decode_limit"),
    [
        (True, False, 0.10, 0.08),
        (False, False, 0.15, 0.2),
        (True, True, 0.08, 0.12),
        (False, True, 0.25, 0.2),
    ],
)
def test_scaling_predicts_each_pair_from_the_others(
    is_same_gpu: bool, is_group: bool, prefill_limit: float, decode_limit: float
) -> None:
    """The median over pairs of the mean error, by whether the GPU itself was measured."""
    errors = []
    for profile in PROFILES:
        others = [
            other
            for other in PROFILES
            if (other.gpu == profile.gpu) is is_same_gpu
            and other != profile
            and other.num_gpus == profile.num_gpus
        ]
        if others and (profile.num_gpus > 1) is is_group:
            errors.append(_mean_errors(profile, others))
    prefill, decode = zip(*errors, strict=True)
    assert statistics.median(prefill) < prefill_limit
    assert statistics.median(decode) < decode_limit
    assert max(*prefill, *decode) < 0.6


def test_header_is_the_documented_one() -> None:
    assert tuple(TEXT.splitlines()[0].split(",")) == COLUMNS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("A10,Qwen-7B,1,prefill,,0,0,relative,0.9,0.1,0.1,9,s,l", r"line 2.*constant_1"),
        ("A10,Qwen-7B,x,prefill,1,0,0,relative,0.9,0.1,0.1,9,s,l", "line 2.*num_gpus"),
        ("A10,Qwen-7B,1,prefill,1,0,0,relative,0.9,0.1,0.1,9,s,l", "Qwen-7B on A10 .*both"),
    ],
)
def test_broken_lines_are_named(line: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        parse([",".join(COLUMNS), line])


@pytest.mark.parametrize("constant", ["-1", "nan", "x"])
def test_broken_constants_are_named(constant: str) -> None:
    rest = "0,0,relative,0.9,0.1,0.1,9,s,l"
    lines = [f"A10,Qwen-7B,1,{phase},{constant},{rest}" for phase in ("prefill", "decode")]
    with pytest.raises(DataError, match="Qwen-7B on A10: "):
        parse([",".join(COLUMNS), *lines])
