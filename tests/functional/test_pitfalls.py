"""Errors of other systems that need the real engine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.wire import messages as m
from tests.functional.worker_peer import WorkerPeer, encode_request

MODELS = ("tiny-llama", "tiny-qwen3")
NUM_PARALLEL = 24
NUM_SWITCHES = 20


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device with room for one model and a half, that asks the self-check at every switch."""
    sizes = [(tiny_models[name] / "model.safetensors").stat().st_size for name in MODELS]
    peer = WorkerPeer(
        int(1.5 * max(sizes)),
        kv_host_bytes=64 << 20,
        quota_max_s=0.05,
        self_check_interval=1,
        options={"--prefix-cache-bytes": 0},  # else KV of ended requests would stay
    )
    for name in MODELS:
        peer.load(name, tiny_models[name], max_model_len=256)
    yield peer
    peer.close()


def test_pitfall_05_a_late_request_of_a_model_without_an_snapshot_does_not_park(
    peer: WorkerPeer,
) -> None:
    before = answer(peer, "tiny-llama", "before")
    peer.channel.send(m.DropSnapshot("tiny-llama"))
    peer.wait(m.SnapshotDropped)
    for model in ("tiny-llama", "unknown"):
        send_directly(peer, model, "late", encode_request("late", prompt(0)))
        failed = peer.wait(m.RequestsFailed)
        assert (failed.model, failed.request_ids) == (model, ["late"])
    snapshot = peer.snapshots["tiny-llama"]
    peer.channel.send(m.TakeSnapshot("tiny-llama"), (snapshot.fd,))
    assert peer.wait(m.SnapshotTaken).problem == ""
    assert answer(peer, "tiny-llama", "after") == before


def test_pitfalls_09_and_10_many_switches_keep_nothing(peer: WorkerPeer) -> None:
    """No page, no slot and no byte of shared memory; and the weights are what they were."""
    digests = {name: peer.call("checksum", model=name) for name in MODELS}
    before = peer.call("leftovers")
    for number in range(NUM_SWITCHES):
        name = MODELS[number % 2]
        if number % 10 < 2:
            answer(peer, name, f"leak-{number}")
        assert peer.call("checksum", model=name) == digests[name]
    after = peer.call("leftovers")
    assert after["free_pages"] == after["pages"]
    assert after["kv_host_bytes"] == 0
    assert after["shmem_bytes"] <= before["shmem_bytes"]
    peer.call("check_integrity")


def test_pitfall_25_many_parallel_requests_say_what_each_says_alone(peer: WorkerPeer) -> None:
    asked = {f"many-{n}": (MODELS[n % 2], n // 2) for n in range(NUM_PARALLEL)}
    alone = {key: answer(peer, key[0], f"alone-{i}", key[1]) for i, key in asked.items()}
    num_switches = len(peer.switches)
    for request_id, (name, index) in asked.items():
        peer.ask(name, request_id, prompt(index), max_tokens=24)
    for name in 4 * MODELS:  # KV of all of them goes out and comes back meanwhile
        num_tokens = sum(map(len, peer.tokens.values()))
        while sum(map(len, peer.tokens.values())) == num_tokens:
            peer.pump(0.5)
        peer.call("page_out", model=name)
    peer.run_until_ended(*asked)
    assert {i: peer.tokens[i] for i in asked} == {i: alone[key] for i, key in asked.items()}
    assert len(peer.switches) > num_switches + len(MODELS)
    peer.call("check_integrity")


def test_pitfall_34_a_request_that_was_refused_is_not_counted(peer: WorkerPeer) -> None:
    """Else its model would count as busy for good, and give its memory up last."""
    send_directly(peer, "tiny-llama", "broken", [b"not a request"])
    failed = peer.wait(m.RequestsFailed)
    assert "the engine refused the request" in failed.message
    assert peer.call("leftovers")["free_pages"] > 0  # refused while a request is live


def test_pitfall_27_a_self_check_waits_for_room(peer: WorkerPeer) -> None:
    """It is due when its model's own requests have taken all pages: no reason to fail."""
    name = MODELS[0]
    short = [f"short-{n}" for n in range(80)]  # from now on, answers are taken to be short
    for request_id in short:
        peer.ask(name, request_id, [random.Random(request_id).randrange(300, 1900)], max_tokens=1)
    peer.run_until_ended(*short)
    long = [f"long-{n}" for n in range(24)]
    for number, request_id in enumerate(long):
        peer.ask(name, request_id, prompt(number)[:30], max_tokens=200)
    while not set(long) <= set(peer.ended):
        for _ in range(10):
            peer.pump(0.5)
        peer.call("page_out", model=name)
    assert all(len(peer.tokens[request_id]) == 200 for request_id in long)
    assert not peer.wrong_answers
    peer.call("check_integrity")


def prompt(index: int) -> list[int]:
    """A prompt of its own, long enough to span KV blocks."""
    rng = random.Random(index)
    return [rng.randrange(300, 1900) for _ in range(34 + index)]


def answer(peer: WorkerPeer, model: str, request_id: str, index: int = 0) -> list[int]:
    peer.ask(model, request_id, prompt(index), max_tokens=24)
    peer.run_until_ended(request_id)
    return peer.tokens[request_id]


def send_directly(peer: WorkerPeer, model: str, request_id: str, frames: list[bytes]) -> None:
    """As a daemon would that does not know what has just happened."""
    now_s = time.monotonic()
    peer.channel.send(m.AddRequest(model, request_id, now_s, len(prompt(0)), 0, frames))
