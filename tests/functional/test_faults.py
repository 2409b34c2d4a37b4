"""A minute of kills: one worker after the other, the frontend once; nobody loses anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import run_faults
from tests.functional.daemon_tools import MODELS

# 15 s to two minutes of work for two cores, which also bring workers back all the time.
NUM_REQUESTS = 120


@pytest.mark.slow
def test_every_answer_is_complete_and_the_same(tiny_models: dict[str, Path]) -> None:
    run = run_faults([tiny_models[name] for name in MODELS], NUM_REQUESTS)
    assert run["completed"] == run["requests"] == NUM_REQUESTS, run["problems"]
    assert run["differing_texts"] == 0
    assert run["kills"] >= 3
    assert run["frontend_kills"] == 1
    assert run["pages_leaked"] == 0
