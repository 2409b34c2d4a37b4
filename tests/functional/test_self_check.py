"""A model whose bytes have changed in host memory is found out, and says no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupoold.wire import messages as m
from tests.functional.daemon_tools import weight_bytes
from tests.functional.worker_peer import WorkerPeer, prompt

INTERVAL = 3
PROMPT = [11, 7, 42, 5]


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["tiny-llama", "tiny-bert-embed"])
def test_a_damaged_snapshot_is_noticed(
    tiny_models: dict[str, Path], tiny_pooling_models: dict[str, Path], damaged: str
) -> None:
    known = tiny_models | tiny_pooling_models
    paths = {name: known[name] for name in (damaged, "tiny-qwen3")}
    size = max((path / "model.safetensors").stat().st_size for path in paths.values())
    peer = WorkerPeer(int(2.6 * size), self_check_interval=INTERVAL)
    try:
        for name, path in paths.items():
            peer.load(name, path, max_model_len=256)
        first = {name: _answer(peer, name, f"first-{name}") for name in paths}
        for turn in range(2 * INTERVAL):  # the self-check is asked, and nobody notices
            for name in paths:
                assert _answer(peer, name, f"{turn}-{name}") == first[name]
        assert not peer.wrong_answers
        snapshot = peer.snapshots[damaged]
        os.pwrite(snapshot.fd, b"\x3f" * (os.fstat(snapshot.fd).st_size // 2), 0)
        for turn in range(INTERVAL + 1):
            if peer.wrong_answers:
                break
            for name in reversed(paths):
                _answer(peer, name, f"damaged-{turn}-{name}")
        [wrong] = peer.wrong_answers
        assert isinstance(wrong, m.WrongAnswer)
        assert (wrong.model, wrong.expected) == (damaged, snapshot.self_check)
        assert wrong.answered != snapshot.self_check
        assert _answer(peer, "tiny-qwen3", "other") == first["tiny-qwen3"]
        assert any("damaged" in reason for reason in peer.ended.values())
        peer.call("check_integrity")
    finally:
        peer.close()


def _answer(peer: WorkerPeer, model: str, request_id: str) -> list[int]:
    peer.call("page_out", model=model)  # so that its weights have to come in
    task = "embed" if model.endswith("embed") else None
    peer.ask(model, request_id, PROMPT, task=task, max_tokens=4)
    peer.run_until_ended(request_id)
    return peer.tokens[request_id]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bert-embed"])
def test_a_model_is_verified_beside_streams(
    tiny_models: dict[str, Path], tiny_pooling_models: dict[str, Path], name: str
) -> None:
    """Its answers stay the same amid switches and migrations, until its snapshot is damaged."""
    paths = {**tiny_models, **tiny_pooling_models}
    size = max(weight_bytes(paths[one]) for one in (name, "tiny-qwen3"))
    peer = WorkerPeer(int(1.5 * size) + (8 << 20))
    try:
        for model in (name, "tiny-qwen3"):
            peer.load(model, paths[model], max_model_len=128)
        [alone] = peer.answers_alone(["tiny-qwen3"], 1, 60).values()
        peer.ask("tiny-qwen3", "stream", prompt(0), max_tokens=60)
        assert peer.call("verify", model=name) == {"problem": ""}
        peer.run_until_ended("stream")
        assert peer.tokens["stream"] == alone
        peer.call("check_integrity")
        snapshot = peer.snapshots[name]
        os.pwrite(snapshot.fd, b"\x3f" * (os.fstat(snapshot.fd).st_size // 2), 0)
        problem = peer.call("verify", model=name)["problem"]
        assert problem.startswith("switched out and in after each token, the answer to prompt 0")
    finally:
        peer.close()
