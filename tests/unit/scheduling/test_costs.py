"""A latency model as a few numbers says the same as the model."""

from __future__ import annotations

import pytest

from gpupoold.latency.models import (
    LatencyModel,
    LinearDecode,
    LinearPrefill,
    PrefillModel,
    SwitchModel,
)
from gpupoold.scheduling.events import ModelCosts, costs_of

SWITCH = SwitchModel(1e9)
PAPER = LatencyModel(
    PrefillModel(4096, 11008, c1=2e-16, c2=3e-13, c3=0.011),
    LinearDecode(context_s=2e-8, sequence_s=0.0, base_s=0.0095),
    SWITCH,
)
LINEAR = LatencyModel(
    LinearPrefill(token_s=8e-5, base_s=0.012),
    LinearDecode(context_s=2e-8, sequence_s=3e-5, base_s=0.014),
    SWITCH,
)


@pytest.mark.parametrize("latency", [PAPER, LINEAR])
def test_prefills_agree(latency: LatencyModel) -> None:
    costs = costs_of(latency)
    for tokens in (0, 1, 100, 1000, 32_000):
        assert costs.prefill_s(tokens) == pytest.approx(latency.prefill_s([tokens]), rel=1e-6)


@pytest.mark.parametrize("latency", [PAPER, LINEAR])
def test_chunks_agree(latency: LatencyModel) -> None:
    costs = costs_of(latency)
    for done, new in ((0, 1), (0, 500), (3000, 500), (10_000, 1)):
        step_s = latency.mixed_step_s([(done, new)], 7, 3000)
        expected_s = step_s - latency.decode_step_s(7, 3000)
        assert costs.chunk_s(done, new) == pytest.approx(expected_s, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("latency", [PAPER, LINEAR])
def test_steps_agree(latency: LatencyModel) -> None:
    costs = costs_of(latency)
    for batch_size, context in ((1, 0), (1, 100), (7, 3000), (64, 400_000)):
        expected_s = latency.decode_step_s(batch_size, context)
        assert costs.step_s(batch_size, context) == pytest.approx(expected_s, rel=1e-6)


def test_the_numbers_are_those_of_the_laws() -> None:
    costs = costs_of(LINEAR)
    assert costs.prefill_token_s == pytest.approx(8e-5)
    assert costs.prefill_token2_s == pytest.approx(0.0, abs=1e-15)
    assert costs.decode_sequence_s == pytest.approx(3e-5)
    assert costs.decode_context_s == pytest.approx(2e-8)


def test_the_guess_for_an_unknown_model_is_positive() -> None:
    assert ModelCosts().prefill_s(1000) > ModelCosts().prefill_s(0) > 0
    assert ModelCosts().step_s(1, 0) > 0
