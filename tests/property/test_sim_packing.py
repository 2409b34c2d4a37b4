"""The peak of any requests' KV is the peak over all times."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpupoold.domain import Targets
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.state import Model, Request
from gpupoold.sim.policies import peak_kv_bytes

COSTS = ModelCosts(0.1, 0.0, decode_base_s=0.02)
MODELS = [Model(f"m{n}", Targets(1.0, tbt_s), 1, n, COSTS) for n, tbt_s in ((1, 0.1), (3, 0.2))]
REQUESTS = st.lists(
    st.builds(
        lambda model, prompt, made, expected: Request(
            "r", model, 0.0, prompt, None, num_tokens=made, expected_tokens=expected
        ),
        st.sampled_from(MODELS),
        *(st.integers(0, 60) for _ in range(3)),
    ),
    max_size=8,
)


def held_bytes(requests: list[Request], at_s: float) -> float:
    total = 0.0
    for one in requests:
        left_s = max(0, one.expected_tokens - one.num_tokens) * one.model.targets.tbt_s
        if at_s <= left_s + 1e-9:
            grown = at_s / one.model.targets.tbt_s
            total += (one.context_tokens + grown) * one.model.kv_bytes_per_token
    return total


@given(REQUESTS)
def test_peak_is_that_of_all_times(requests: list[Request]) -> None:
    times = max((held_bytes(requests, 0.1 * tenths) for tenths in range(121)), default=0.0)
    assert peak_kv_bytes(requests) == pytest.approx(times)
