"""Quantized models answer as in vLLM alone, whatever is switched meanwhile, on packed weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.survey import estimate_weight_bytes
from tests.functional.processor import HAS_AMX
from tests.functional.test_tiny_models_in_vllm import answers
from tests.functional.worker_peer import WorkerPeer

# Some formats have no fast kernels on a CPU: minutes for an answer beside another test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ANSWER_TIMEOUT_S = 600.0

# The formats of one device each, and the dtypes that the formats compute in on a CPU.
DTYPES = {
    "gptq": "float16",
    "w8a8": "bfloat16" if HAS_AMX else "float32",
    "awq": "float16",
    "w4a16": "bfloat16",
    "fp8-channel": "float32",
}
BOXES = (("gptq", "w8a8"), ("awq", "w4a16", "fp8-channel"))
NUM_TOKENS = 40
NUM_PROMPTS = 3


def prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(7 + 40 * index)]


class Box:
    """A worker with room for one of its models and a half, and the answers of vLLM alone."""

    def __init__(self, paths: dict[str, Path], alone: dict[str, list[list[int]]]) -> None:
        self.paths = paths
        self.alone = alone
        sizes = {name: estimate(path, DTYPES[name]) for name, path in paths.items()}
        self.peer = WorkerPeer(int(1.5 * max(sizes.values())) + (1 << 20), quota_max_s=0.1)
        self.loaded = {
            name: self.peer.load(name, path, dtype=DTYPES[name], max_model_len=256)
            for name, path in paths.items()
        }

    def answers(self, label: str, cut: int = 0) -> dict[str, list[list[int]]]:
        """Ask all models all prompts at once, for the tokens after ``cut``."""
        ids = {(n, i): f"{label}-{n}-{i}" for n in self.paths for i in range(NUM_PROMPTS)}
        for (name, index), request_id in ids.items():
            known = self.alone[name][index][:cut]
            self.peer.ask(name, request_id, prompt(index), known, max_tokens=NUM_TOKENS)
        self.peer.run_until_ended(*ids.values(), timeout_s=ANSWER_TIMEOUT_S)
        found: dict[str, list[list[int]]] = {name: [] for name in self.paths}
        for (name, _), request_id in ids.items():
            found[name].append(self.peer.tokens[request_id])
        return found


def estimate(path: Path, dtype: str) -> int:
    info = check_checkpoint(path, allow_pickle=False, allow_remote_code=False)
    return estimate_weight_bytes(info, dtype)


def without_data(path: Path, target: Path) -> Path:
    """A copy of a checkpoint whose weights are zeros; vLLM reads the header for the format."""
    shutil.copytree(path, target)
    file = target / "model.safetensors"
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:start].ljust(len(content), b"\0"))
    return target


def rotary_bytes(dtype: str) -> int:
    """The table of rotary embeddings, which the engine computes: 4096 positions, 64 numbers."""
    return 4096 * 64 * (4 if dtype == "float32" else 2)


@pytest.fixture(
    scope="module", params=[BOXES[0], pytest.param(BOXES[1], marks=pytest.mark.slow)], ids="-".join
)
def box(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    project_env: dict[str, str],
) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("quantized")
    make = [sys.executable, "-m", "scripts.tiny_quantized", str(folder)]
    subprocess.run([*make, "--format", *request.param], env=project_env, check=True)
    paths = {name: folder / f"tiny-llama-{name}" for name in request.param}
    command = [sys.executable, __file__, json.dumps({n: str(path) for n, path in paths.items()})]
    env = project_env | {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    box = Box(paths, json.loads(done.stdout.splitlines()[-1]))
    yield box
    box.peer.call("check_integrity")
    box.peer.close()


def test_answers_are_those_of_vllm_alone(box: Box) -> None:
    for answer in (one for found in box.alone.values() for one in found):
        assert len(set(answer)) > NUM_TOKENS // 2, "noise, or a loop"
    assert box.answers("together") == box.alone
    assert len(box.peer.switches) >= len(box.paths)


def test_answers_continue_in_an_engine_that_has_not_seen_their_beginning(box: Box) -> None:
    cut = NUM_TOKENS // 3
    rest = {name: [one[cut:] for one in answers] for name, answers in box.alone.items()}
    assert box.answers("resumed", cut) == rest


def test_a_switch_moves_packed_weights(box: Box) -> None:
    for name, path in box.paths.items():
        num_bytes = box.loaded[name].model.weight_bytes - rotary_bytes(DTYPES[name])
        # vLLM's layout for AMX adds to the packed weights.
        tolerance = 0.15 if HAS_AMX and DTYPES[name] == "bfloat16" else 0.02
        assert num_bytes == pytest.approx(estimate(path, DTYPES[name]), rel=tolerance)


def test_weights_and_kv_are_the_same_bytes_after_a_switch(box: Box) -> None:
    name, other = list(box.paths)[:2]
    box.peer.ask(name, "paused", prompt(1), max_tokens=150)
    while len(box.peer.tokens["paused"]) < 20:
        box.peer.pump(1.0)
    before, _, _, after = box.peer.call_many(
        [
            ("checksum", {"model": name}),
            ("page_out", {"model": name}),
            ("checksum", {"model": other}),
            ("checksum", {"model": name}),
        ]
    )
    assert after == before
    box.peer.abort(name, "paused")


def test_a_snapshot_replaces_the_checkpoint(box: Box, tmp_path: Path) -> None:
    for name, path in box.paths.items():
        loaded = box.peer.load(
            f"{name}-again",
            without_data(path, tmp_path / name),
            dtype=DTYPES[name],
            max_model_len=256,
            snapshot=box.peer.snapshots[name],
        )
        assert loaded.snapshot_problem == ""
        assert loaded.self_check == box.loaded[name].self_check
        assert len(loaded.self_check) == 8
        box.peer.ask(f"{name}-again", f"again-{name}", prompt(0), max_tokens=NUM_TOKENS)
        box.peer.run_until_ended(f"again-{name}", timeout_s=ANSWER_TIMEOUT_S)
        assert box.peer.tokens[f"again-{name}"] == box.alone[name][0]


def alone(path: str, dtype: str) -> list[list[int]]:
    """Answer the prompts one after the other with vLLM's own engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    arguments: dict[str, Any] = {"model": path, "dtype": dtype, "enforce_eager": True}
    arguments |= {"max_model_len": 256, "kv_cache_memory_bytes": 32 << 20}
    config = EngineArgs(**arguments, enable_prefix_caching=False).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    found = [answers(core, [prompt(index)], NUM_TOKENS)[0] for index in range(NUM_PROMPTS)]
    core.shutdown()
    return found


if __name__ == "__main__":
    asked: dict[str, str] = json.loads(sys.argv[1])
    print(json.dumps({name: alone(path, DTYPES[name]) for name, path in asked.items()}), flush=True)
    os._exit(0)  # vLLM's exit handlers are not under test
