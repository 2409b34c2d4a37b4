"""A model comes up from its snapshot without its checkpoint, and only if it is the same model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.worker_peer import WorkerPeer

MODELS = ("tiny-llama", "tiny-mixtral")
PROMPT = list(range(5, 95))


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    peer = WorkerPeer(40 << 20)
    for name in MODELS:
        peer.load(name, tiny_models[name])
    yield peer
    peer.close()


def answer(peer: WorkerPeer, model: str) -> list[int]:
    request_id = f"{model} {len(peer.tokens)}"
    peer.ask(model, request_id, PROMPT, max_tokens=40)
    peer.run_until_ended(request_id)
    return peer.tokens[request_id]


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_not_read_from_the_checkpoint(
    name: str, peer: WorkerPeer, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    without_weights = tmp_path / name
    shutil.copytree(
        tiny_models[name], without_weights, ignore=shutil.ignore_patterns("*.safetensors")
    )
    again = f"{name}-again"
    loaded = peer.load(again, without_weights, snapshot=peer.snapshots[name])
    assert loaded.snapshot_problem == ""
    assert len(loaded.self_check) == 8
    assert loaded.self_check == peer.snapshots[name].self_check
    assert loaded.layout_digest == peer.snapshots[name].layout_digest
    assert os.fstat(peer.snapshots[again].fd).st_ino == os.fstat(peer.snapshots[name].fd).st_ino
    assert answer(peer, again) == answer(peer, name)


def test_a_damaged_snapshot_is_found_by_the_self_check(
    peer: WorkerPeer, tiny_models: dict[str, Path]
) -> None:
    first = peer.load("before", tiny_models["tiny-llama"])
    damaged = peer.snapshots["before"]
    os.pwrite(damaged.fd, os.urandom(4 << 20), 1 << 20)
    loaded = peer.load("after", tiny_models["tiny-llama"], snapshot=damaged)
    assert "with its snapshot the model answers" in loaded.snapshot_problem
    assert loaded.self_check == first.self_check
    assert answer(peer, "after") == answer(peer, "tiny-llama")
    peer.call("check_integrity")


def test_an_snapshot_of_something_else_is_not_used(
    peer: WorkerPeer, tiny_models: dict[str, Path]
) -> None:
    path = tiny_models["tiny-mixtral"]
    other = peer.load("other", path, snapshot=peer.snapshots["tiny-llama"])
    assert "the snapshot has another layout" in other.snapshot_problem
    assert other.layout_digest == peer.snapshots["tiny-mixtral"].layout_digest
    unlike = peer.snapshots["tiny-mixtral"]._replace(layout_digest="made by another version")
    assert "another layout" in peer.load("unlike", path, snapshot=unlike).snapshot_problem
    assert answer(peer, "other") == answer(peer, "unlike") == answer(peer, "tiny-mixtral")
    peer.call("check_integrity")
