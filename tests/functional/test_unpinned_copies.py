"""Weights and KV that a driver does not pin: the tokens are those of a device without a driver."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.rig import weight_bytes
from gpupoold.checkpoints.tiny import Recipe, make_checkpoint
from tests.functional.worker_peer import WorkerPeer, prompt

SIZE_BYTES = 12 << 20
NUM_PROMPTS, NUM_TOKENS = 3, 12
NAMES = ("llama", "qwen3")
_MODELLED = {"--link-bytes-per-s": 400_000_000, "--pin-bytes-per-s": 10_000_000_000}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unpinned")
    return {name: make_checkpoint(folder, Recipe(name, SIZE_BYTES)) for name in NAMES}


def start(checkpoints: dict[str, Path], options: dict[str, Any]) -> WorkerPeer:
    """A device for one model and its KV."""
    num_ranks = options.get("--num-gpus", 1)
    num_bytes = int(1.4 * max(map(weight_bytes, checkpoints.values()))) // num_ranks
    peer = WorkerPeer(num_bytes, (32 << 20) // num_ranks, options=options, quota_max_s=0.1)
    for name, path in checkpoints.items():
        peer.load(name, path, max_model_len=512)
    return peer


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    peer = start(checkpoints, {})
    try:
        return peer.answers_alone(list(NAMES), NUM_PROMPTS, NUM_TOKENS)
    finally:
        peer.close()


@pytest.fixture(
    params=[(0, 1), (100 << 20, 1), pytest.param((50 << 20, 2), marks=pytest.mark.slow)],
    ids=["nothing", "a part", "a part, on a group"],
)
def peer(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path: Path
) -> Iterator[WorkerPeer]:
    """A device whose driver pins nothing, or the host cache, buffers and one of the models."""
    limit_bytes, num_ranks = request.param
    options = {
        **_MODELLED,
        "--pinned-limit-bytes": limit_bytes,
        "--locks": tmp_path,
        "--num-gpus": num_ranks,
        "--are-cores-shared": int(num_ranks > 1),
    }
    peer = start(checkpoints, options)
    yield peer
    peer.close()


def test_answers_are_those_of_pinned_memory(
    peer: WorkerPeer, expected: dict[tuple[str, int], list[int]]
) -> None:
    """Models take turns, and KV leaves and comes back."""
    rng = random.Random(1)
    asked = {}
    for number in range(12):
        key = (NAMES[number % 2], rng.randrange(NUM_PROMPTS))
        asked[f"request-{number}"] = key
        peer.ask(key[0], f"request-{number}", prompt(key[1]), max_tokens=NUM_TOKENS)
        peer.pump(rng.uniform(0, 0.1))
        if rng.random() < 0.4:
            peer.call("page_out", model=rng.choice(NAMES))
    peer.run_until_ended(*asked)
    for request_id, key in asked.items():
        assert peer.tokens[request_id] == expected[key]
    peer.call("check_integrity")
    assert peer.status is not None
    assert peer.status.unpinned_bytes >= SIZE_BYTES // 4
    assert "the modelled driver pins at most" in peer.status.pinning_problem
