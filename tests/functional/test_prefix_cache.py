"""KV of ended requests in host memory: later turns of conversations, below the control plane."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bench.rig import weight_bytes
from gpupoold.scheduling.events import ModelRemoved, Unhosted
from gpupoold.wire import messages as m
from tests.conftest import ROOT
from tests.functional.worker_peer import WorkerPeer

_MODELS = ("tiny-llama", "tiny-mixtral", "tiny-qwen3")
_NUM_TURNS = 4
_TURN_TOKENS = 70
_MAX_TOKENS = 16
_AHEAD = {"GPUPOOL_ENGINE_ARGUMENTS": '{"async_scheduling": true}'}


@pytest.fixture(
    scope="module",
    params=[pytest.param({}, marks=pytest.mark.slow), _AHEAD],
    ids=["one-by-one", "ahead"],
)
def peer(tiny_models: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[WorkerPeer]:
    """A device that holds the weights of one and a half models, and little KV."""
    largest = max(weight_bytes(tiny_models[name]) for name in _MODELS)
    peer = WorkerPeer(
        int(1.5 * largest), kv_host_bytes=64 << 20, quota_max_s=0.05, environment=request.param
    )
    for name in _MODELS:
        peer.load(name, tiny_models[name], max_model_len=1024)
    yield peer
    peer.close()


def user_turn(conversation: int, turn: int) -> list[int]:
    rng = random.Random(f"{conversation}-{turn}")
    return [rng.randrange(300, 1900) for _ in range(_TURN_TOKENS)]


def converse(peer: WorkerPeer, num_conversations: int, salt: str | None) -> dict[str, list[int]]:
    """The answers of all turns; all conversations of all models ask a turn at once.

    With a ``salt``, no request finds the KV of another one.
    """
    histories: dict[tuple[str, int], list[int]] = {
        (model, one): [] for model in _MODELS for one in range(num_conversations)
    }
    answers = {}
    for turn in range(_NUM_TURNS):
        ids = {}
        for (model, one), history in histories.items():
            ids[model, one] = request_id = f"{salt}-{model}-{one}-{turn}"
            history += user_turn(one, turn)
            own = None if salt is None else request_id
            peer.ask(model, request_id, list(history), cache_salt=own, max_tokens=_MAX_TOKENS)
        peer.run_until_ended(*ids.values())
        for key, request_id in ids.items():
            answers[f"{key}-{turn}"] = peer.tokens[request_id]
            histories[key] += peer.tokens[request_id]
    return answers


def memory_of(peer: WorkerPeer) -> dict[str, m.ModelMemory]:
    """A status made after this call."""
    peer.wait(m.WorkerStatus)
    peer.wait(m.WorkerStatus)
    assert peer.status is not None
    return {one.model: one for one in peer.status.models}


def test_later_turns_find_the_kv_of_earlier_ones(peer: WorkerPeer) -> None:
    before = memory_of(peer)
    expected = converse(peer, 6, "alone")
    unsalted = memory_of(peer)
    assert all(unsalted[name].prefix_hit_bytes == before[name].prefix_hit_bytes for name in before)
    assert converse(peer, 6, None) == expected
    after = memory_of(peer)
    for name in _MODELS:
        hit_bytes = after[name].prefix_hit_bytes - before[name].prefix_hit_bytes
        assert hit_bytes > 0, name
        assert after[name].prefix_saved_bytes > 0
    assert peer.status is not None
    assert 0 < peer.status.activity.prefix_bytes <= peer.status.kv_host_slab_bytes
    assert peer.status.activity.kv_host_bytes == 0
    peer.call("check_integrity")


_FAMILIES = ("granite4", "gemma3", "mistral-window", "gpt-oss", "llama4", "falcon-h1")


@pytest.mark.slow
@pytest.mark.parametrize("family", _FAMILIES)
def test_kinds_of_kv(family: str, project_env: dict[str, str]) -> None:
    """Windows, chunks and states: two engines of a family take turns."""
    folder = ROOT / "build" / "families"
    make = [sys.executable, "-m", "benchmarks.families.make", str(folder), "--only", family]
    subprocess.run(make, env=project_env, cwd=ROOT, check=True, capture_output=True, timeout=120)
    path = folder / family
    peer = WorkerPeer(int(1.2 * weight_bytes(path)) + (48 << 20), kv_host_bytes=256 << 20)
    names = ["first", "second"]
    try:
        for name in names:
            peer.load(name, path, max_model_len=2048, timeout_s=120.0)
        answers: dict[str | None, list[list[int]]] = {"alone": [], None: []}
        for salt, given in answers.items():
            history = {name: user_turn(0, 0) * 9 for name in names}
            for turn in range(1, _NUM_TURNS):
                for name in names:  # one request at a time: the same batches each time
                    history[name] += user_turn(0, turn)
                    request_id = f"{salt}-{name}-{turn}"
                    own = None if salt is None else request_id
                    peer.ask(name, request_id, list(history[name]), cache_salt=own, max_tokens=8)
                    peer.run_until_ended(request_id)
                    peer.call("page_out", model=name)
                    history[name] += peer.tokens[request_id]
                    given.append(peer.tokens[request_id])
        memory = memory_of(peer)
        assert answers[None] == answers["alone"]
        assert all(memory[name].prefix_hit_bytes > 0 for name in names)
        peer.call("check_integrity")
    finally:
        peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_host_bytes", [96 << 10, 64 << 20], ids=["little-host", "much-host"])
def test_little_memory_costs_time_but_no_token(
    tiny_models: dict[str, Path], kv_host_bytes: int
) -> None:
    """More prefixes wait than the device, or the host, has memory for."""
    names = _MODELS[:2]
    largest = max(weight_bytes(tiny_models[name]) for name in names)
    peer = WorkerPeer(int(1.25 * largest), kv_host_bytes=kv_host_bytes, quota_max_s=0.05)
    try:
        for name in names:
            peer.load(name, tiny_models[name], max_model_len=512)
        answers: dict[str, list[list[int]]] = {"alone": [], "together": []}
        for turn in range(3):
            turns = range(turn + 1)
            prompts = [[token for t in turns for token in user_turn(one, t)] for one in range(10)]
            for name in names:
                for one, prompt in enumerate(prompts):  # one after the other, without reuse
                    request_id = f"alone-{name}-{one}-{turn}"
                    peer.ask(name, request_id, prompt, cache_salt=request_id, max_tokens=12)
                    peer.run_until_ended(request_id)
                    answers["alone"].append(peer.tokens[request_id])
            ids = [f"{name}-{one}-{turn}" for name in names for one in range(10)]
            for request_id in ids:
                name, number, _ = request_id.rsplit("-", 2)
                peer.ask(name, request_id, prompts[int(number)], max_tokens=12)
            peer.run_until_ended(*ids)
            answers["together"] += [peer.tokens[request_id] for request_id in ids]
        assert answers["together"] == answers["alone"]
        memory_of(peer)
        peer.call("check_integrity")
    finally:
        peer.close()


def test_a_model_is_unloaded_during_its_turn(
    peer: WorkerPeer, tiny_models: dict[str, Path]
) -> None:
    """The KV of its requests, which end with it, is not saved for later ones."""
    peer.load("guest", tiny_models["tiny-qwen2"], max_model_len=512)
    for number in range(3):
        peer.ask("guest", f"doomed-{number}", user_turn(number, 0), max_tokens=400)
    while not all(peer.tokens[f"doomed-{number}"] for number in range(3)):
        peer.pump(0.5)
    peer.abort("guest", *(f"doomed-{number}" for number in range(3)))
    peer.channel.send(m.UnloadModel("guest"))
    peer.wait(m.ModelUnloaded)
    peer.shell.handle(Unhosted(0, "guest"), ModelRemoved("guest"))
    peer.ask("tiny-llama", "after", user_turn(0, 0), max_tokens=4)
    peer.run_until_ended("after")
