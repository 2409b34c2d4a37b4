"""What a fit refuses, and what its quality means."""

from __future__ import annotations

import math

import pytest

from gpupoold.latency.models import (
    DecodeBatch,
    DecodeSample,
    LinearDecode,
    LinearPrefill,
    PrefillModel,
    PrefillSample,
    Weighting,
    quality_of,
)
from gpupoold.latency.shape import FitError
from gpupoold.worker.profiling import fit_law, solve

TRUE = LinearDecode(context_s=1e-7, sequence_s=1e-4, base_s=0.009)
GRID = [DecodeBatch(b, b * c) for b in (1, 4, 16, 64) for c in (16, 128, 1024)]


def samples_of(law: LinearDecode) -> list[DecodeSample]:
    return [DecodeSample(batch, law.predict_s(batch)) for batch in GRID]


def test_exact_points_give_exact_constants() -> None:
    fit = fit_law(LinearDecode(), samples_of(TRUE))
    assert fit.law.constants == pytest.approx(TRUE.constants, rel=1e-9)
    assert fit.quality.r_squared == pytest.approx(1.0)
    assert fit.quality.num_points == len(GRID)


def test_least_squares_of_a_textbook_line() -> None:
    # Sum of x 15, of y 20, of xy 66, of xx 55, n 5: slope 0.6, intercept 2.2.
    rows = [(float(x), 1.0) for x in (1, 2, 3, 4, 5)]
    assert solve(rows, [2.0, 4.0, 5.0, 4.0, 5.0]) == pytest.approx([0.6, 2.2])


def test_too_few_points() -> None:
    with pytest.raises(FitError, match="2 points cannot determine 3 constants"):
        fit_law(LinearDecode(), samples_of(TRUE)[:2])
    with pytest.raises(FitError, match="0 points"):
        fit_law(LinearDecode(), [])


def test_points_that_are_all_alike() -> None:
    same = [DecodeSample(DecodeBatch(4, 400), 0.01)] * 10
    with pytest.raises(FitError, match="term 2 follows from the terms before it at all 10 points"):
        fit_law(LinearDecode(), same)


def test_one_context_length_cannot_tell_context_from_batch() -> None:
    points = [DecodeSample(DecodeBatch(b, b * 100), 0.01 + b * 1e-4) for b in range(1, 20)]
    with pytest.raises(FitError, match="vary prompt lengths, batch sizes and contexts"):
        fit_law(LinearDecode(), points)


def test_term_that_is_always_zero() -> None:
    points = [DecodeSample(DecodeBatch(b, 0), 0.01 * b) for b in range(1, 6)]
    with pytest.raises(FitError, match="term 1 is zero at all 5 points"):
        fit_law(LinearDecode(), points)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_time_is_named(duration_s: float) -> None:
    points = [*samples_of(TRUE), DecodeSample(DecodeBatch(1, 1), duration_s)]
    with pytest.raises(FitError, match="point 12, "):
        fit_law(LinearDecode(), points)


def test_no_constant_is_negative() -> None:
    points = [PrefillSample([n], 1e-5 * n - 0.001) for n in (200, 400, 800, 1600)]
    bounded = fit_law(LinearPrefill(), points)
    assert bounded.law.base_s == 0.0
    assert bounded.law.token_s > 0


def test_floors_hold_and_the_rest_adapts() -> None:
    floor = (4e-7, 0.0, 0.0)
    fit = fit_law(LinearDecode(), samples_of(TRUE), floors=floor)
    assert fit.law.context_s == floor[0]
    assert fit.law.sequence_s < TRUE.sequence_s
    low = fit_law(LinearDecode(), samples_of(TRUE), floors=(1e-8, 1e-5, 0.0))
    assert low.law.constants == pytest.approx(TRUE.constants, rel=1e-9)


def test_relative_weighting_serves_the_short_steps() -> None:
    # A quadratic cost fitted by a line: absolute errors are ruled by the longest prompt.
    points = [
        PrefillSample([n], 0.005 + 1e-5 * n + 1e-8 * n * n) for n in (16, 64, 256, 1024, 4096)
    ]
    relative = fit_law(LinearPrefill(), points, weighting=Weighting.RELATIVE)
    absolute = fit_law(LinearPrefill(), points, weighting=Weighting.ABSOLUTE)
    assert relative.quality.mean_relative_error < absolute.quality.mean_relative_error
    assert relative.quality.r_squared < absolute.quality.r_squared


def test_quality_on_points_that_were_not_fitted() -> None:
    law = LinearPrefill(1e-5, 0.0)
    points = [PrefillSample([1000 * i], 0.01 * i * (1.1 if i == 10 else 1.0)) for i in range(1, 11)]
    quality = quality_of(law, points)
    assert quality.mean_relative_error == pytest.approx((0.1 / 1.1) / 10)
    assert quality.p90_relative_error == pytest.approx(0.0, abs=1e-12)
    assert 0.9 < quality.r_squared < 1
    with pytest.raises(FitError, match="no points"):
        quality_of(law, [])


def test_times_that_do_not_vary_have_no_r_squared_to_speak_of() -> None:
    points = [PrefillSample([100], 0.5), PrefillSample([100], 0.5)]
    assert quality_of(LinearPrefill(0.005, 0.0), points).r_squared == 1.0
    assert quality_of(LinearPrefill(0.004, 0.0), points).r_squared == 0.0


def test_equation_5_needs_prompts_of_different_lengths() -> None:
    law = PrefillModel(4096, 11008)
    points = [PrefillSample([256] * b, 0.01 + 0.005 * b) for b in (1, 2, 4, 8)]
    with pytest.raises(FitError, match="term 2 follows"):
        fit_law(law, points)
