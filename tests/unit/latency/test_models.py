"""The laws as the papers write them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from gpupoold.latency.models import (
    DecodeBatch,
    Fit,
    FitQuality,
    LatencyModel,
    LinearDecode,
    LinearPrefill,
    PrefillModel,
    Profile,
    StoredFit,
    StoredLatency,
    SwitchModel,
)
from gpupoold.latency.shape import DataError, LatencyError, builtin_shape

H, M, B = 4096, 11008, 128  # the last is the block size of the attention kernel

QUALITY = FitQuality(0.99, 0.02, 0.05, 9)
PREFILL = PrefillModel(4096, 14336, 1e-13, 2e-9, 0.004)
DECODE = LinearDecode(2e-7, 1e-4, 0.01)
LATENCY = StoredLatency(
    device="NVIDIA A10",
    engine_version="0.32.0",
    dtype="bfloat16",
    measured_at=1_700_000_000.0,
    bandwidth_bytes_per_s=2e10,
    prefill=StoredFit.of(Fit(PREFILL, QUALITY)),
    decode=StoredFit.of(Fit(DECODE, QUALITY)),
)


def test_equation_5_term_by_term() -> None:
    law = PrefillModel(H, M, c1=1e-13, c2=1e-11, c3=0.01)
    lengths = [100, 300]
    t, t2 = 400, 100**2 + 300**2
    expected = 1e-13 * (4 * t * H * H + 2 * t * H * M) + 1e-11 * (3 * H * t2 / B) + 0.01
    assert law.predict_s(lengths) == pytest.approx(expected, rel=1e-14)


def test_equation_5_one_long_prompt_costs_more_than_two_halves_of_it() -> None:
    law = PrefillModel(H, M, c1=1e-13, c2=1e-11, c3=0.01)
    assert law.predict_s([8192]) > law.predict_s([4096, 4096])


def test_aladdin_equation_2() -> None:
    assert LinearPrefill(2e-5, 0.007).predict_s([100, 300]) == pytest.approx(0.007 + 400 * 2e-5)


def test_aladdin_equation_3() -> None:
    k2, c2, c3, batch_size, mean_context = 1e-7, 1e-4, 0.009, 8, 500
    law = LinearDecode(context_s=k2, sequence_s=c2, base_s=c3)
    batch = DecodeBatch(batch_size, batch_size * mean_context)
    assert law.predict_s(batch) == pytest.approx((k2 * mean_context + c2) * batch_size + c3)


@pytest.mark.parametrize(
    "law",
    [
        PrefillModel.of(builtin_shape("Qwen-7B")),
        LinearPrefill(),
        LinearDecode(),
    ],
)
def test_constants_go_in_and_come_out(law: Any) -> None:
    constants = tuple(float(i + 1) for i in range(len(law.constants)))
    changed = law.with_constants(constants)
    assert changed.constants == constants
    assert type(changed) is type(law)
    with pytest.raises(ValueError, match="values to unpack"):
        law.with_constants([1.0])


def test_combined_model_asks_the_right_law() -> None:
    model = LatencyModel(
        LinearPrefill(1e-5, 0.01), LinearDecode(1e-7, 1e-4, 0.01), SwitchModel(5e10)
    )
    assert model.prefill_s([1000]) == pytest.approx(0.02)
    assert model.decode_step_s(10, 10_000) == pytest.approx(0.012)
    assert model.switch_s(25_000_000_000) == 0.5
    assert model.switch_s(0) == 0.0
    assert not model.is_scaled


def test_no_work_takes_no_time() -> None:
    model = LatencyModel(
        LinearPrefill(1e-5, 0.01), LinearDecode(1e-7, 1e-4, 0.01), SwitchModel(1e9)
    )
    assert model.prefill_s([]) == 0.0
    assert model.decode_step_s(0, 0) == 0.0


@pytest.mark.parametrize("law", [PrefillModel(H, M, 1e-13), LinearPrefill(1e-5)])
def test_negative_prompt_is_refused(law: Any) -> None:
    with pytest.raises(LatencyError, match=r"\[5, -1\]"):
        law.predict_s([5, -1])


@pytest.mark.parametrize("batch", [DecodeBatch(-1, 0), DecodeBatch(1, -1)])
def test_negative_decode_batch_is_refused(batch: DecodeBatch) -> None:
    with pytest.raises(LatencyError, match="negative"):
        LinearDecode(1e-7).predict_s(batch)


def test_negative_constants_never_predict_negative_time() -> None:
    assert LinearPrefill(1e-5, -1.0).predict_s([10]) == 0.0


def test_a_mixed_step_is_a_decode_step_and_what_its_tokens_add() -> None:
    """0.1 ms and 0.1 us squared per prompt token; 10 ms for a prefill, 20 ms and 1 per answer."""
    prefill = PrefillModel(1, 0, c1=1e-4 / 4, c2=B * 1e-7 / 3, c3=0.01)
    decode = LinearDecode(context_s=0.0, sequence_s=0.001, base_s=0.02)
    latency = LatencyModel(prefill, decode, SwitchModel(1e9))
    assert latency.mixed_step_s([(0, 100)], 0, 0) == pytest.approx(0.01 + 0.01 + 0.001)
    assert latency.mixed_step_s([(0, 100)], 5, 50) == pytest.approx(0.025 + 0.01 + 0.001)
    # The second hundred attend to the first: 200^2 - 100^2.
    assert latency.mixed_step_s([(100, 100)], 5, 50) == pytest.approx(0.025 + 0.01 + 0.003)
    both = latency.mixed_step_s([(100, 100), (0, 50)], 5, 50)
    assert both == pytest.approx(0.025 + 0.01 + 0.003 + 0.005 + 0.00025)
    whole = latency.mixed_step_s([(0, 100)], 0, 0) + latency.mixed_step_s([(100, 100)], 0, 0)
    assert whole == pytest.approx(latency.prefill_s([200]) + 0.01)


@pytest.mark.parametrize("law", [PREFILL, LinearPrefill(1e-5, 0.01)])
def test_prefill_laws_come_back(law: Any) -> None:
    stored = StoredFit.of(Fit(law, QUALITY))
    assert stored.prefill_law() == law
    assert (stored.r_squared, stored.num_points) == (0.99, 9)
    with pytest.raises(DataError, match="no decode law"):
        stored.decode_law()


def test_decode_laws_come_back() -> None:
    stored = StoredFit.of(Fit(DECODE, QUALITY))
    assert stored.decode_law() == DECODE
    with pytest.raises(DataError, match="no prefill law"):
        stored.prefill_law()


def test_constants_must_be_as_many_as_the_law_has() -> None:
    broken = replace(StoredFit.of(Fit(DECODE, QUALITY)), constants=(1.0,))
    with pytest.raises(DataError, match="1 constants"):
        broken.decode_law()


def test_the_whole_latency() -> None:
    model = LATENCY.model()
    assert model is not None
    assert (model.prefill, model.decode) == (PREFILL, DECODE)
    assert not model.is_scaled
    assert "NVIDIA A10" in model.source
    assert LATENCY.prefill_s([100]) == model.prefill_s([100])
    assert LATENCY.decode_step_s(8, 4000) == DECODE.predict_s(DecodeBatch(8, 4000))
    assert LATENCY.switch_s(10**10) == model.switch_s(10**10) == 0.5


def test_half_of_it_is_no_model() -> None:
    no_prefill, no_decode = replace(LATENCY, prefill=None), replace(LATENCY, decode=None)
    assert no_prefill.model() is None
    assert no_decode.model() is None
    assert no_prefill.prefill_s([1]) is None
    assert no_prefill.decode_step_s(1, 1) is not None
    assert no_decode.prefill_s([1]) is not None
    assert no_decode.decode_step_s(1, 1) is None


def test_messages_and_json_carry_it() -> None:
    profile = Profile(LATENCY.prefill, None, 0.7, "decode: too slow")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=Profile) == profile
    assert msgspec.convert(asdict(LATENCY), StoredLatency) == LATENCY
