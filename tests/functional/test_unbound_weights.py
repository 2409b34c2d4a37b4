"""Weights of fine-tunes stay on a device without an engine, and are mapped when they get one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fine_tunes import fine_tune, limit_engines
from gpupoold.scheduling import events as e
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    api_client,
    ask,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    usage,
    weight_bytes,
)
from tests.functional.worker_peer import WorkerPeer, prompt

NAMES = ("a", "b", "c")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def paths(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder, base = tmp_path_factory.mktemp("family"), tiny_models[LLAMA]
    return {name: fine_tune(base, folder / name, number) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def peer(paths: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A device of 2.5 models with one engine, and a link, so that turns may start early."""
    options = {"--link-bytes-per-s": 1_000_000_000}
    made = WorkerPeer(int(2.5 * weight_bytes(paths["a"])), options=options)
    try:
        yield made
    finally:
        made.close()


def pass_on(peer: WorkerPeer, before: str, name: str, path: Path) -> m.ModelLoaded:
    """Let a model take the engine of another over."""
    if before:
        peer.channel.send(m.UnloadModel(before, keeps_engine=True))
        assert peer.wait(m.ModelUnloaded).is_engine_kept
        peer.shell.handle(e.ModelRemoved(before))
    loaded = peer.load(name, path, snapshot=peer.snapshots.get(name), max_model_len=256)
    assert (loaded.engine_of, loaded.snapshot_problem) == (before, "")
    peer.call("check_integrity")
    return loaded


def answer(peer: WorkerPeer, name: str) -> list[int]:
    request_id = f"{name} {len(peer.ended)}"
    peer.ask(name, request_id, prompt(0), max_tokens=16)
    peer.run_until_ended(request_id)
    return peer.tokens[request_id]


def digest(peer: WorkerPeer, name: str) -> str:
    """Of the snapshot, as the worker's of the bytes on the device."""
    data = os.pread(peer.snapshots[name].fd, peer.loaded[name].weight_bytes, 0)
    return hashlib.sha256(data).hexdigest()


def unbound_bytes(peer: WorkerPeer) -> dict[str, int]:
    """As the worker says from now on."""
    peer.call("check_integrity")
    peer.wait(m.WorkerStatus)
    return peer.wait(m.WorkerStatus).unbound_bytes


def test_siblings_of_one_engine(peer: WorkerPeer, paths: dict[str, Path]) -> None:
    before, alone = "", {}
    for name, path in paths.items():
        pass_on(peer, before, name, path)
        alone[name] = answer(peer, name)
        before = name
    assert len(set(map(tuple, alone.values()))) == len(NAMES)
    num_bytes = os.fstat(peer.snapshots["a"].fd).st_size
    assert unbound_bytes(peer)["b"] == num_bytes
    assert unbound_bytes(peer)["a"] < num_bytes
    for name in ("b", "c", "b", "c"):
        num_switches = len(peer.switches)
        assert pass_on(peer, before, name, paths[name]).resident_bytes == num_bytes
        assert unbound_bytes(peer)[before] == num_bytes
        assert answer(peer, name) == alone[name]
        assert not any(switch.weight_bytes for switch in peer.switches[num_switches:])
        assert peer.call("checksum", model=name)["weights"] == digest(peer, name)
        before = name
    loaded = pass_on(peer, before, "a", paths["a"])
    assert loaded.resident_bytes < num_bytes
    assert answer(peer, "a") == alone["a"]
    peer.call("page_out", model="c")
    assert "c" not in unbound_bytes(peer)
    assert pass_on(peer, "a", "c", paths["c"]).resident_bytes == 0
    assert answer(peer, "c") == alone["c"]


def test_an_engine_with_drafts_is_for_its_model_only(
    peer: WorkerPeer, paths: dict[str, Path]
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    options = {"speculative_config": json.dumps(drafts)}
    loaded = peer.load("drafts", paths["a"], max_model_len=256, engine=options)
    assert (loaded.family, loaded.why_unshared) == ("", "its steps have drafts")
    peer.channel.send(m.UnloadModel("drafts", keeps_engine=True))
    assert not peer.wait(m.ModelUnloaded).is_engine_kept
    peer.shell.handle(e.ModelRemoved("drafts"))


@pytest.mark.slow
async def test_users_see_them(paths: dict[str, Path], tmp_path: Path) -> None:
    config = emulated_config(int(2.5 * weight_bytes(paths["a"])))
    with private_daemon(config, tmp_path / "box") as daemon:
        for number, (name, path) in enumerate(paths.items()):
            daemon.add_model(name, path, **LOAD_OPTIONS)
            if not number:
                limit_engines(daemon)
        async with api_client(daemon.http_url) as api:
            alone = {name: (await ask(api, name, PROMPT, 24)).token_ids for name in NAMES}
            for name in ("b", "c", "b"):
                assert (await ask(api, name, PROMPT, 24)).token_ids == alone[name]
        [engine] = usage(daemon, "b").engines
        [(number, num_bytes)] = usage(daemon, "c").unbound_bytes.items()
        assert (number, engine.resident_bytes) == (0, num_bytes)
        assert "on device 0 without an engine" in cli(daemon, "why", "c").stdout
        assert "on device 0" in cli(daemon, "show", "c").stdout
        assert "on device 0" in cli(daemon, "cache", "ls").stdout
        assert "a, c" in cli(daemon, "cache", "ls").stdout
        assert f"({format_bytes(num_bytes)})" in cli(daemon, "ps").stdout
        assert cli(daemon, "unload", "c", "--keep-host").returncode == 0
        await eventually(lambda: not usage(daemon, "c").unbound_bytes)
        assert cli(daemon, "rm", "a").returncode == 0
        async with api_client(daemon.http_url) as api:
            assert (await ask(api, "c", PROMPT, 24)).token_ids == alone["c"]
        assert usage(daemon, "c").engines[0].resident_bytes == 0
