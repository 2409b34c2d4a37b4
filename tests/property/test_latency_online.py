"""Whatever is observed, a refined law stays finite, bounded and usable."""

from __future__ import annotations

import math
import random

from hypothesis import given, strategies as st

from gpupoold.latency.models import DecodeBatch, LinearDecode
from gpupoold.latency.online import OnlineFit, OnlineSettings

START = LinearDecode(context_s=1e-7, sequence_s=1e-4, base_s=0.009)
batches = st.builds(DecodeBatch, st.integers(0, 1000), st.integers(0, 10**7))
times = st.one_of(st.floats(), st.floats(1e-4, 10))
observations = st.lists(st.tuples(batches, times), max_size=150)


@given(observations, st.floats(2, 1000), st.floats(1.5, 20))
def test_constants_stay_finite_and_bounded(
    seen: list[tuple[DecodeBatch, float]], half_life: float, max_change: float
) -> None:
    online = OnlineFit(START, OnlineSettings(half_life=half_life, max_change=max_change))
    for batch, duration_s in seen:
        online.observe(batch, duration_s)
        for now, then in zip(online.law.constants, START.constants, strict=True):
            assert math.isfinite(now)
            assert then / max_change * 0.999 <= now <= then * max_change * 1.001


@given(
    st.floats(0.5, 2.0),
    st.floats(0.5, 2.0),
    st.floats(0.5, 2.0),
    st.integers(0, 2**32),
)
def test_it_converges_on_a_varied_load_with_noise_and_stalls(
    context: float, sequence: float, base: float, seed: int
) -> None:
    true = LinearDecode(1e-7 * context, 1e-4 * sequence, 0.009 * base)
    rng = random.Random(seed)
    online = OnlineFit(START)
    for _ in range(800):
        size = rng.choice((1, 4, 16, 64))
        batch = DecodeBatch(size, size * rng.choice((64, 512, 4096)))
        noise = rng.uniform(0.97, 1.03)
        stall = 20.0 if rng.random() < 0.01 else 1.0
        online.observe(batch, true.predict_s(batch) * noise * stall)
    for size in (1, 16, 64):
        for mean_context in (64, 4096):
            batch = DecodeBatch(size, size * mean_context)
            assert abs(online.law.predict_s(batch) / true.predict_s(batch) - 1) < 0.1
