"""A worker needs no FlashInfer."""

from __future__ import annotations

import importlib.util
import os

import pytest

from gpupoold.worker.environment import set_engine_environment

SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"


@pytest.mark.parametrize(
    ("is_installed", "before", "after"),
    [(False, None, "0"), (False, "1", "1"), (True, None, None)],
    ids=["missing", "asked for", "installed"],
)
def test_flashinfer_samples_only_where_it_is_installed(
    is_installed: bool, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {SAMPLER: before})
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if is_installed else None
    )
    set_engine_environment("info")
    assert os.environ.get(SAMPLER) == after
