"""Turns that begin before all weights are present: the tokens are those of a resident model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.rig import weight_bytes
from gpupoold.checkpoints.tiny import Recipe, make_checkpoint
from gpupoold.system.activity import ThreadPhase
from tests.conftest import ROOT
from tests.functional.worker_peer import WorkerPeer
from tests.support.vllm_environment import ENVIRONMENT

SIZE_BYTES = 28 << 20  # two ranks divide the heads
MAX_TOKENS = 6
PROMPTS = (5, 40, 300)
# A model takes 150 ms. Ranks that compete for the cores have slower links, so that weights are
# still on their way when a step begins.
LINK_BYTES_PER_S = 200_000_000
NUM_RANKS = 2
SLOW = pytest.mark.slow
# Steps are begun before the last one's tokens are known, as on a GPU.
_AHEAD = {"GPUPOOL_ENGINE_ARGUMENTS": '{"async_scheduling": true}'}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("early-starts")
    return {
        arch: make_checkpoint(folder, Recipe(arch, SIZE_BYTES)) for arch in ("llama", "mixtral")
    }


@pytest.fixture(
    scope="module",
    params=[
        "ahead",
        *(
            pytest.param(one, marks=SLOW)
            for one in ("one by one", "on a group", "ahead, on a group")
        ),
    ],
)
def peer(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device with a link and room for one model and its KV; a group has a link for each rank."""
    largest = max(map(weight_bytes, checkpoints.values()))
    num_ranks = NUM_RANKS if "group" in request.param else 1
    ranks = {"--num-gpus": num_ranks, "--are-cores-shared": int(num_ranks > 1)}
    peer = WorkerPeer(
        int(1.3 * largest) // num_ranks,
        kv_host_bytes=(64 << 20) // num_ranks,
        quota_max_s=0.05,
        options={"--link-bytes-per-s": LINK_BYTES_PER_S // num_ranks**2} | ranks,
        environment=_AHEAD if "ahead" in request.param else {},
    )
    for name, path in checkpoints.items():
        peer.load(name, path, max_model_len=512)
    yield peer
    peer.close()


@pytest.mark.slow
def test_answers_equal_those_of_resident_models(peer: WorkerPeer) -> None:
    rng = random.Random(1)
    names = ("llama", "mixtral")
    expected = {}
    for name in names:
        peer.ask(name, f"{name}-first", prompt(0), max_tokens=1)
        peer.run_until_ended(f"{name}-first")  # all weights have arrived with its step
        for index in range(len(PROMPTS)):
            request_id = f"resident-{name}-{index}"
            peer.ask(name, request_id, prompt(index), max_tokens=MAX_TOKENS)
            peer.run_until_ended(request_id)
            expected[name, index] = peer.tokens[request_id]
    peer.switches.clear()
    for number in range(12):  # each after a switch
        key = (names[number % 2], rng.randrange(len(PROMPTS)))
        peer.ask(key[0], f"early-{number}", prompt(key[1]), max_tokens=MAX_TOKENS)
        peer.run_until_ended(f"early-{number}")
        assert peer.tokens[f"early-{number}"] == expected[key]
    early = [one for one in peer.switches if one.late_weight_bytes]
    assert len(early) >= 6
    asked = {}
    for number in range(16):  # some arrive in a turn, some wait, KV leaves and comes back
        key = (rng.choice(names), rng.randrange(len(PROMPTS)))
        asked[f"mixed-{number}"] = key
        peer.ask(key[0], f"mixed-{number}", prompt(key[1]), max_tokens=MAX_TOKENS)
        peer.pump(rng.uniform(0, 0.1))
        if rng.random() < 0.3:
            peer.call("page_out", model=rng.choice(names))
    peer.run_until_ended(*asked)
    for request_id, key in asked.items():
        assert peer.tokens[request_id] == expected[key]
    peer.call("check_integrity")


def test_all_weights_are_right_when_bytes_are_compared(peer: WorkerPeer) -> None:
    before = [peer.call("checksum", model=name)["weights"] for name in ("llama", "mixtral")]
    after = [peer.call("checksum", model=name)["weights"] for name in ("llama", "mixtral")]
    assert before == after


@pytest.mark.slow
def test_a_failed_copy_makes_no_token_and_early_reads_are_found(
    checkpoints: dict[str, Path], project_env: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.functional.early_starts", str(checkpoints["llama"])],
        env=project_env | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["differing"] == []
    assert figures["num_gates"] == figures["num_layers"] > 2
    assert min(figures["late_bytes"]) > 0
    assert figures["bytes_copied_on_return"] == 0
    assert figures["num_gates_on_return"] == figures["num_gates"]
    assert "broken" in figures["failure"]
    assert figures["failure_phase"] == ThreadPhase.SWITCH
    assert figures["num_outputs_after_failure"] == 0
    assert figures["starts_early_with_early_reads"] is False
    assert figures["resident_after_early_reads"] is True


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(PROMPTS[index])]
