"""Samplers of a worker."""

from __future__ import annotations

import os

import pytest

from gpupoold.engine_versions import KNOWN_VARIABLES
from gpupoold.worker.process import set_engine_environment

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_flashinfer_samples_only_where_the_owner_asks_for_it(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether FlashInfer is installed or not: its kernels are compiled, perhaps in vain."""
    monkeypatch.setattr(os, "environ", {} if before is None else {SAMPLER: before})
    set_engine_environment("info")
    assert os.environ[SAMPLER] == after
    assert SAMPLER in KNOWN_VARIABLES, "the daemon passes it on"
