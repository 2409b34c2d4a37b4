"""Models of vLLM's Transformers backend: what the backend takes from config.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.families.make import make_family
from benchmarks.families.table import family_named
from tests.functional.worker_peer import WorkerPeer, prompt

DEVICE_BYTES = 48 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerPeer]:
    peer = WorkerPeer(DEVICE_BYTES)
    yield peer
    peer.close()


def test_a_wrong_number_of_heads_is_refused_and_ends_no_worker(
    worker: WorkerPeer, tmp_path: Path
) -> None:
    """The projections make 4 heads of keys. With 2 heads in the cache, vLLM's kernel would write
    the KV of a decode step to slots of steps before, at addresses without pages."""
    sound = family_named("gpt-neox")
    worker.load("sound", make_family(sound, tmp_path), max_model_len=512)
    config = dict(sound.config) | {"num_key_value_heads": 2}
    wrong = make_family(replace(sound, name="wrong", config=config), tmp_path)
    with pytest.raises(AssertionError, match=r"gets keys of 128 numbers.*2 heads of 32"):
        worker.load("wrong", wrong, max_model_len=512, profiling_budget_s=1.0)
    worker.ask("sound", "after", prompt(0), max_tokens=8)
    worker.run_until_ended("after")
    assert len(worker.tokens["after"]) == 8


def test_a_bias_of_the_head_is_part_of_the_snapshot(worker: WorkerPeer, tmp_path: Path) -> None:
    """The backend makes the parameter only while the checkpoint is read."""
    path = make_family(family_named("phi"), tmp_path)
    worker.load("first", path, max_model_len=512)
    again = worker.load("second", path, max_model_len=512, snapshot=worker.snapshots["first"])
    assert not again.snapshot_problem
    for model in ("first", "second"):
        worker.ask(model, model, prompt(0), max_tokens=24)
        worker.run_until_ended(model)
    assert worker.tokens["first"] == worker.tokens["second"]
