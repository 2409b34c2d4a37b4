"""One real worker below the control plane: engines switched between tokens, on paged memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from benchmarks.bench.rig import weight_bytes
from gpupoold.checkpoints.tiny import Recipe, make_checkpoint
from gpupoold.wire import messages as m
from tests.functional.worker_peer import WorkerPeer, prompt

MAX_TOKENS = 24
NUM_PROMPTS = 4
_RUNS = itertools.count()
# Steps are begun before the last one's tokens are known, as on a GPU.
_AHEAD = {"GPUPOOL_ENGINE_ARGUMENTS": '{"async_scheduling": true}'}
_MODELS = ("tiny-llama", "tiny-mixtral", "tiny-qwen2", "tiny-qwen3")


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device that holds the weights of one and a half models, turns of at most 50 ms."""
    sizes = [weight_bytes(tiny_models[name]) for name in _MODELS]
    peer = WorkerPeer(
        int(1.5 * max(sizes)), kv_host_bytes=64 << 20, quota_max_s=0.05, environment=_AHEAD
    )
    for name in _MODELS:
        peer.load(name, tiny_models[name], max_model_len=512)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def alone(peer: WorkerPeer) -> dict[tuple[str, int], list[int]]:
    """Each prompt's greedy answer when nothing else runs."""
    return peer.answers_alone(_MODELS, NUM_PROMPTS, MAX_TOKENS)


def test_concurrent_answers_equal_those_alone(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]]
) -> None:
    peer.switches.clear()
    ids = {key: f"together-{key[0]}-{key[1]}" for key in alone}
    for (model, index), request_id in ids.items():
        peer.ask(model, request_id, prompt(index), max_tokens=MAX_TOKENS)
    peer.run_until_ended(*ids.values())
    assert {key: peer.tokens[request_id] for key, request_id in ids.items()} == alone
    assert len(peer.switches) >= len(_MODELS)
    peer.call("check_integrity")


def test_weights_and_paused_kv_are_the_same_bytes_after_a_switch(peer: WorkerPeer) -> None:
    peer.ask("tiny-llama", "paused", prompt(1), max_tokens=400)
    while len(peer.tokens["paused"]) < 20:
        peer.pump(1.0)
    # Calls are answered between two steps; nothing steps the model in between.
    results = peer.call_many(
        [
            ("checksum", {"model": "tiny-llama"}),
            ("page_out", {"model": "tiny-llama"}),
            ("checksum", {"model": "tiny-qwen2"}),
            ("checksum", {"model": "tiny-llama"}),
        ]
    )
    before, moved, _, after = results
    assert moved["kv_out_bytes"] > 0
    assert before["num_live_blocks"] > 0
    assert after == before
    peer.abort("tiny-llama", "paused")
    peer.call("check_integrity")


def test_a_cancelled_request_frees_its_kv_at_once(peer: WorkerPeer) -> None:
    peer.ask("tiny-qwen3", "gone", prompt(2), max_tokens=400)
    while len(peer.tokens["gone"]) < 5:
        peer.pump(1.0)
    peer.abort("tiny-qwen3", "gone")
    assert peer.call("checksum", model="tiny-qwen3")["num_live_blocks"] == 0
    peer.call("check_integrity")


def test_answers_survive_a_full_host_cache(tiny_models: dict[str, Path]) -> None:
    """Paused KV that fits nowhere is recomputed: slower, never wrong."""
    names = ("tiny-llama", "tiny-qwen3")
    largest = max(weight_bytes(tiny_models[name]) for name in names)
    peer = WorkerPeer(
        int(1.3 * largest), kv_host_bytes=128 << 10, quota_max_s=0.02, environment=_AHEAD
    )
    try:
        for name in names:
            peer.load(name, tiny_models[name], max_model_len=256)
        expected = {}
        for name in names:
            peer.ask(name, f"alone-{name}", prompt(0), max_tokens=MAX_TOKENS)
            peer.run_until_ended(f"alone-{name}")
            expected[name] = peer.tokens[f"alone-{name}"]
        ids = {f"{name}-{copy}": name for name in names for copy in range(6)}
        for request_id, name in ids.items():
            peer.ask(name, request_id, prompt(0), max_tokens=MAX_TOKENS)
        peer.run_until_ended(*ids)
        assert {i: peer.tokens[i] for i in ids} == {i: expected[n] for i, n in ids.items()}
        peer.call("check_integrity")
    finally:
        peer.close()


@pytest.mark.slow
def test_a_burst_leaves_an_idle_model_its_weights(tmp_path: Path) -> None:
    """KV is backed for the requests that can run, not for the whole queue."""
    path = make_checkpoint(tmp_path, Recipe("llama", 8 << 20))
    peer = WorkerPeer(60 << 20, environment=_AHEAD)
    try:
        for name in ("idle", "busy"):
            peer.load(name, path)
            peer.ask(name, f"warm-{name}", prompt(0), max_tokens=4)
            peer.run_until_ended(f"warm-{name}")
        ids = [f"burst-{number}" for number in range(200)]
        for request_id in ids:
            peer.ask("busy", request_id, prompt(0), cache_salt=request_id, max_tokens=MAX_TOKENS)
        peer.run_until_ended(*ids)
        assert len({tuple(peer.tokens[request_id]) for request_id in ids}) == 1
        assert peer.tokens[ids[0]][:4] == peer.tokens["warm-idle"]
        peer.wait(m.WorkerStatus)
        peer.wait(m.WorkerStatus)
        assert peer.status is not None
        memory = {one.model: one for one in peer.status.models}
        idle = memory["idle"]
        assert idle.weights_resident_bytes == idle.weights_total_bytes
        assert memory["busy"].kv_resident_bytes > 16 << 20  # the burst did not fit in little
        peer.call("check_integrity")
    finally:
        peer.close()


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_schedule_changes_a_token(
    peer: WorkerPeer, alone: dict[tuple[str, int], list[int]], data: st.DataObject
) -> None:
    """Any order of arrivals, forced switches and cancellations gives the tokens of a run alone."""
    run = next(_RUNS)
    asked: dict[str, tuple[str, int]] = {}
    cancelled: set[str] = set()
    for number in range(data.draw(st.integers(4, 14), label="events")):
        kind = data.draw(st.sampled_from(["ask", "ask", "ask", "cancel", "page_out", "wait"]))
        if kind == "ask":
            key = (data.draw(st.sampled_from(_MODELS)), data.draw(st.integers(0, NUM_PROMPTS - 1)))
            request_id = f"{run}-{number}"
            asked[request_id] = key
            peer.ask(key[0], request_id, prompt(key[1]), max_tokens=MAX_TOKENS)
        elif kind == "cancel" and asked:
            request_id = data.draw(st.sampled_from(sorted(asked)))
            cancelled.add(request_id)
            peer.abort(asked[request_id][0], request_id)
        elif kind == "page_out":
            peer.call("page_out", model=data.draw(st.sampled_from(_MODELS)))
        else:
            peer.pump(data.draw(st.floats(0, 0.05)))
    kept = [request_id for request_id in asked if request_id not in cancelled]
    peer.run_until_ended(*kept)
    for request_id in kept:
        assert peer.tokens[request_id] == alone[asked[request_id]]
    for request_id in cancelled:
        tokens = peer.tokens[request_id]
        assert tokens == alone[asked[request_id]][: len(tokens)]
    peer.call("check_integrity")
