"""A fit finds the constants its points were made with, in any units, noise or not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from gpupoold.latency.models import (
    DecodeBatch,
    DecodeSample,
    LinearDecode,
    LinearPrefill,
    PrefillModel,
    PrefillSample,
    Weighting,
)
from gpupoold.worker.profiling import fit_law, solve

H, M = 4096, 11008
PROMPTS = [(n,) * b for n in (16, 64, 256, 1024, 4096) for b in (1, 2, 4, 8)]
DECODES = [DecodeBatch(b, b * c) for b in (1, 2, 8, 32, 128) for c in (16, 128, 1024, 8192)]

weightings = st.sampled_from(Weighting)
prefill_laws = st.builds(
    PrefillModel,
    st.just(H),
    st.just(M),
    c1=st.floats(5e-14, 2e-12),
    c2=st.floats(2e-12, 2e-10),
    c3=st.floats(0.002, 0.05),
)
decode_laws = st.builds(
    LinearDecode,
    context_s=st.floats(2e-8, 1e-6),
    sequence_s=st.floats(3e-5, 5e-4),
    base_s=st.floats(0.003, 0.05),
)


@given(prefill_laws, weightings)
def test_equation_5_is_recovered(law: PrefillModel, weighting: Weighting) -> None:
    points = [PrefillSample(batch, law.predict_s(batch)) for batch in PROMPTS]
    fit = fit_law(PrefillModel(H, M), points, weighting=weighting)
    assert fit.law.constants == pytest.approx(law.constants, rel=1e-6)
    assert fit.quality.r_squared > 1 - 1e-9


@given(st.floats(1e-6, 1e-3), st.floats(0.001, 0.1), weightings)
def test_linear_prefill_is_recovered(token_s: float, base_s: float, weighting: Weighting) -> None:
    law = LinearPrefill(token_s, base_s)
    points = [PrefillSample(batch, law.predict_s(batch)) for batch in PROMPTS]
    fit = fit_law(LinearPrefill(), points, weighting=weighting)
    assert fit.law.constants == pytest.approx(law.constants, rel=1e-6)


@given(decode_laws, weightings, st.integers(0, 2**32))
def test_noise_of_three_per_cent_moves_predictions_little(
    law: LinearDecode, weighting: Weighting, seed: int
) -> None:
    rng = random.Random(seed)
    points = [
        DecodeSample(batch, law.predict_s(batch) * rng.uniform(0.97, 1.03))
        for batch in DECODES
        for _ in range(3)
    ]
    fit = fit_law(LinearDecode(), points, weighting=weighting)
    assert fit.quality.r_squared > 0.9
    if weighting is Weighting.RELATIVE:
        assert fit.quality.mean_relative_error < 0.03
        for batch in DECODES:
            assert fit.law.predict_s(batch) == pytest.approx(law.predict_s(batch), rel=0.03)


@given(prefill_laws, st.integers(0, 2**32))
def test_prefill_with_noise_keeps_r_squared(law: PrefillModel, seed: int) -> None:
    rng = random.Random(seed)
    points = [
        PrefillSample(batch, law.predict_s(batch) * rng.uniform(0.95, 1.05)) for batch in PROMPTS
    ]
    fit = fit_law(PrefillModel(H, M), points)
    assert fit.quality.r_squared > 0.9
    assert min(fit.law.constants) >= 0


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-5, 5)),
        min_size=4,
        max_size=30,
        unique=True,
    ),
    st.floats(1e-9, 1e9),
)
def test_non_negative_solution_cannot_be_improved(
    points: list[tuple[float, float, float]], unit: float
) -> None:
    """No step of either coefficient that stays non-negative lowers the squared error."""
    rows = [(x * unit, y) for x, y, _ in points]
    targets = [target for *_, target in points]
    ratio = [x / y for x, y, _ in points]
    if max(ratio) / min(ratio) < 1.01:  # nearly one column: nothing to find
        return
    found = solve(rows, targets)
    assert min(found) >= 0

    def error(values: list[float]) -> float:
        return sum(
            (values[0] * a + values[1] * b - t) ** 2
            for (a, b), t in zip(rows, targets, strict=True)
        )

    least = error(found)
    for index, step in ((0, 1e-3 / unit), (1, 1e-3)):
        for sign in (-1, 1):
            moved = list(found)
            moved[index] = max(0.0, moved[index] + sign * step)
            assert error(moved) >= least - 1e-9 * max(1.0, least)
