"""Fits as plain data: nothing is lost on the way through a message or JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from gpupoold.latency.models import (
    DecodeBatch,
    Fit,
    FitQuality,
    LinearDecode,
    LinearPrefill,
    PrefillModel,
    Profile,
    StoredFit,
    StoredLatency,
)
from gpupoold.latency.shape import DataError

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
