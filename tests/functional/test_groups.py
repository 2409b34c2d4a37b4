"""Groups of emulated GPUs: the tokens of one GPU alone, and a rank's death like a worker's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from benchmarks.bench.rig import weight_bytes
from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas_models import AddAdapterRequest
from gpupoold.errors import Failed
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    Answer,
    Background,
    api_client,
    ask,
    check_all,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    undisturbed,
    until,
    usage,
)
from tests.functional.worker_peer import WorkerPeer, prompt

MODELS = ("tiny-llama", "tiny-mixtral")
MAX_TOKENS = 24
NUM_PROMPTS = 3
NUM_RANKS = 2
ASKED = [(LLAMA, "one rank"), (QWEN2, "another rank"), (LLAMA, "both of them")]
NUM_TOKENS = 60
BACK_S = 120.0
TEXT = "the ranks of a group have parts of a model"
ADAPTER = "adapter"
ALONE = "-alone"
ENGINE = {"max_lora_rank": "8"}
"""Options of the Llama's engines."""
SCHEMA = {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 20}  # not xgrammar's
MORE: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3, "echo": True},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "choice": {"structured_outputs": {"choice": ["one and two", "three and four"]}},
    "regex": {"structured_outputs": {"regex": "[ab]{3}-[0-9]{4}"}},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "drawn": {"temperature": 1.0, "seed": 5, "n": 3, "top_p": 0.9},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
}
"""Kinds of requests by the fields that make the difference."""


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path]) -> Iterator[WorkerPeer]:
    """A group whose GPUs hold the shards of one and a half models together."""
    largest = max(weight_bytes(tiny_models[name]) for name in MODELS)
    options = {"--num-gpus": NUM_RANKS, "--are-cores-shared": 1}
    peer = WorkerPeer(
        int(1.6 * largest) // NUM_RANKS, kv_host_bytes=32 << 20, quota_max_s=0.05, options=options
    )
    for name in MODELS:
        peer.load(name, tiny_models[name], max_model_len=512)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def of_one_gpu(tiny_models: dict[str, Path]) -> dict[tuple[str, int], list[int]]:
    """Each prompt's greedy answer on a device of one GPU, where nothing else runs."""
    peer = WorkerPeer(sum(4 * weight_bytes(tiny_models[name]) for name in MODELS))
    for name in MODELS:
        peer.load(name, tiny_models[name], max_model_len=512)
    answers = peer.answers_alone(MODELS, NUM_PROMPTS, MAX_TOKENS)
    peer.close()
    return answers


def test_switched_answers_of_a_group_equal_those_of_one_gpu(
    peer: WorkerPeer, of_one_gpu: dict[tuple[str, int], list[int]]
) -> None:
    ids = {key: f"together-{key[0]}-{key[1]}" for key in of_one_gpu}
    for (model, index), request_id in ids.items():
        peer.ask(model, request_id, prompt(index), max_tokens=MAX_TOKENS)
    peer.run_until_ended(*ids.values())
    assert {key: peer.tokens[request_id] for key, request_id in ids.items()} == of_one_gpu
    assert len(peer.switches) >= len(MODELS)
    peer.call("check_integrity")


def test_an_answer_goes_on_after_all_its_bytes_were_in_host_memory(
    peer: WorkerPeer, of_one_gpu: dict[tuple[str, int], list[int]]
) -> None:
    model, index = MODELS[0], NUM_PROMPTS - 1
    peer.ask(model, "paged", prompt(index), max_tokens=MAX_TOKENS)
    while len(peer.tokens["paged"]) < 5:
        peer.pump(1.0)
    moved = peer.call("page_out", model=model)
    assert moved["kv_out_bytes"] > 0
    peer.run_until_ended("paged")
    assert peer.tokens["paged"] == of_one_gpu[model, index]
    peer.call("check_integrity")


def test_answers_without_a_seed_are_drawn_alike_on_all_ranks(peer: WorkerPeer) -> None:
    """A rank that drew another token would compute another answer's KV from then on."""
    model = MODELS[0]
    peer.ask(model, "drawn", prompt(0), max_tokens=MAX_TOKENS, temperature=1.0)
    peer.run_until_ended("drawn")
    drawn = peer.tokens["drawn"]
    # The KV of the prefix is computed anew from the tokens; the greedy rest must agree.
    given = [*prompt(0), *drawn]
    rests = []
    for salt in ("cached", "fresh"):
        peer.ask(model, salt, given, max_tokens=4, cache_salt=None if salt == "cached" else salt)
        peer.run_until_ended(salt)
        rests.append(peer.tokens[salt])
    assert rests[0] == rests[1]


@pytest.mark.slow
def test_loads_that_fail_leave_the_group_as_before(
    peer: WorkerPeer,
    of_one_gpu: dict[tuple[str, int], list[int]],
    tiny_models: dict[str, Path],
    tiny_pooling_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """Before the ranks build, and in the self-check: vLLM's ModernBERT runs on one rank only."""
    shutil.copytree(tiny_models[LLAMA], tmp_path / "one-head")
    config = json.loads((tmp_path / "one-head" / "config.json").read_text())
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "one-head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="attention heads"):
        peer.load("one-head", tmp_path / "one-head", max_model_len=512)
    with pytest.raises(AssertionError, match="in its self-check: split_with_sizes"):
        peer.load("modernbert", tiny_pooling_models["tiny-modernbert-embed"], max_model_len=256)
    model, index = MODELS[0], 0
    peer.ask(model, "afterwards", prompt(index), max_tokens=MAX_TOKENS)
    peer.run_until_ended("afterwards")
    assert peer.tokens["afterwards"] == of_one_gpu[model, index]
    peer.call("check_integrity")


@pytest.fixture(scope="module")
def adapter(
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    project_env: dict[str, str],
) -> Path:
    """An adapter of the Llama."""
    folder = tmp_path_factory.mktemp("adapter")
    command = [sys.executable, "-m", "tests.support.tiny_adapter", str(folder)]
    options = ["--base", str(tiny_models[LLAMA]), "--name", ADAPTER, "--rank", "8"]
    subprocess.run([*command, *options], check=True, env=project_env)
    return folder / ADAPTER


@pytest.fixture(scope="module")
def box(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A group of two GPUs with two models, and a GPU that has the first one too."""
    num_bytes = int(2.2 * max(weight_bytes(tiny_models[name]) for name in (LLAMA, QWEN2)))
    config = emulated_config(num_bytes, num_gpus=NUM_RANKS) + emulated_config(num_bytes)
    with private_daemon(config, tmp_path_factory.mktemp("groups")) as daemon:
        until(lambda: {one.state for one in ps(daemon).devices} == {"ready"}, BACK_S)
        for name, device in ((LLAMA, 0), (LLAMA + ALONE, 1)):
            options = LOAD_OPTIONS | {"engine": ENGINE, "devices": [device]}
            daemon.add_model(name, tiny_models[LLAMA], **options)
        daemon.add_model(QWEN2, tiny_models[QWEN2], devices=[0], **LOAD_OPTIONS)
        until(lambda: all(one.state == "ready" for one in ps(daemon).models), BACK_S)
        yield daemon
        until(lambda: not ps(daemon).requests)
        check_all(daemon)


@pytest.mark.slow
async def test_every_kind_of_request_is_answered_as_on_one_gpu(box: PrivateDaemon) -> None:
    async with httpx.AsyncClient(base_url=box.http_url, timeout=BACK_S) as http:

        async def answer(model: str, kind: str) -> Any:
            body = {"prompt": f"{TEXT} {TEXT} {TEXT}", "max_tokens": 24, "temperature": 0}
            found = await http.post("/v1/completions", json=body | MORE[kind] | {"model": model})
            assert found.status_code == 200, found.text
            return found.json()["choices"]

        found = [
            await asyncio.gather(*(answer(model, kind) for kind in MORE))
            for model in (LLAMA, LLAMA + ALONE)
        ]
    for kind, ours, theirs in zip(MORE, *found, strict=True):
        assert_same(ours, theirs, kind)


@pytest.mark.slow
async def test_adapters_answer_as_on_one_gpu(box: PrivateDaemon, adapter: Path) -> None:
    names = (LLAMA, LLAMA + ALONE)
    with box.client() as client:
        for base in names:
            request = AddAdapterRequest(name=f"{ADAPTER}-{base}", base=base, source=str(adapter))
            for _ in client.add_adapter(request):
                pass
    async with api_client(box.http_url) as api:
        asked = [*names, *(f"{ADAPTER}-{base}" for base in names)]
        answers = [one.token_ids for one in await together(api, asked)]
    assert answers[0] == answers[1] != answers[2] == answers[3]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_answers_survive_the_death_of_a_rank(box: PrivateDaemon, rank: int) -> None:
    async with api_client(box.http_url) as api:
        alone = await undisturbed(api, ASKED, NUM_TOKENS)
        streams = await started(api)
        before = pids_of(box)
        os.kill(before[rank], signal.SIGKILL)
        answers = await asyncio.wait_for(
            asyncio.gather(*(stream.finished() for stream in streams)), BACK_S
        )
        assert answers == alone
        await eventually(lambda: {one.state for one in ps(box).devices} == {"ready"}, BACK_S)
        assert not set(before) & set(pids_of(box)), "a rank of the old group still runs"
        assert await undisturbed(api, ASKED, NUM_TOKENS) == alone
        await eventually(lambda: not ps(box).requests)


@pytest.mark.slow
async def test_answers_survive_the_death_of_a_rank_in_a_load(
    box: PrivateDaemon, tiny_models: dict[str, Path]
) -> None:
    """A follower stops for ever while the ranks read into host memory, and is killed."""

    def add() -> str:
        return box.add_model("late", tiny_models[QWEN2], devices=[0], **LOAD_OPTIONS).state

    def stage() -> str:
        loading = ps(box).devices[0].loading
        return loading.stage if loading is not None and loading.model == "late" else ""

    async with api_client(box.http_url) as api:
        alone = await undisturbed(api, ASKED, NUM_TOKENS)
        streams = await started(api)
        before = pids_of(box)
        adding = asyncio.create_task(asyncio.to_thread(add))
        await eventually(lambda: bool(stage()))
        os.kill(before[1], signal.SIGSTOP)
        await asyncio.sleep(1.0)  # the leader comes to where the ranks wait for each other
        assert stage() in {"builds the engine", "reads the weights", "makes the snapshot"}
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(Failed, match="ended"):
            await adding
        answers = await asyncio.gather(*(stream.finished() for stream in streams))
        assert answers == alone
        await eventually(lambda: {one.state for one in ps(box).devices} == {"ready"}, BACK_S)
        assert await asyncio.to_thread(add) == "ready"
        assert await undisturbed(api, [("late", ASKED[1][1])], NUM_TOKENS) == alone[1:2]
    with box.client() as client:
        client.remove_model("late")


async def started(api: AsyncOpenAI) -> list[Background]:
    """Ask in the background; return when each answer has begun."""
    streams = [Background(api, name, text, NUM_TOKENS) for name, text in ASKED]
    for stream in streams:
        await stream.started()
    return streams


async def together(api: AsyncOpenAI, models: Sequence[str]) -> list[Answer]:
    """Ask models the same at the same time."""
    return await asyncio.gather(*(ask(api, name, TEXT, NUM_TOKENS) for name in models))


def assert_same(one: Any, other: Any, place: str) -> None:
    """Compare two parts of answers; the numbers of logarithms may differ by rounding."""
    if isinstance(one, float):
        assert one == pytest.approx(other, abs=1e-4), place
    elif isinstance(one, dict):
        assert set(one) == set(other), place
        for key, value in one.items():
            assert_same(value, other[key], f"{place}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for pair in zip(one, other, strict=True):
            assert_same(*pair, place)
    else:
        assert one == other, place


@pytest.mark.slow
async def test_each_degree_loads_the_checkpoint_once(
    box: PrivateDaemon, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tiny_models[LLAMA], tmp_path / "both")
    box.add_model("both", checkpoint, devices=[0, 1], **LOAD_OPTIONS)
    assert places(box) == [(1, "host"), (2, "host")]
    async with api_client(box.http_url) as api:
        alone = await ask(api, LLAMA, "two degrees", NUM_TOKENS)
        assert await ask(api, "both", "two degrees", NUM_TOKENS) == alone
        for file in checkpoint.glob("*.safetensors"):
            file.unlink()
        before = [device.pid for device in ps(box).devices]
        for pid in before:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: have_restarted(box, before), BACK_S)
        for number in (0, 1):
            with box.client() as client:
                client.drain(number)
            assert await ask(api, "both", "two degrees", NUM_TOKENS) == alone
            with box.client() as client:
                client.undrain(number)
        await eventually(lambda: not ps(box).requests)
    with box.client() as client:
        assert "snapshot_refused" not in {one.kind for one in client.events()}
    assert places(box) == [(1, "host"), (2, "host")]
    check_all(box)


def places(daemon: PrivateDaemon) -> list[tuple[int, str]]:
    """The degrees and places of the snapshots of the model on both devices."""
    with daemon.client() as client:
        [found] = [one for one in client.cache().models if one.name == "both"]
    return [(one.num_gpus, one.state) for one in found.snapshots]


def have_restarted(daemon: PrivateDaemon, before: list[int | None]) -> bool:
    devices = ps(daemon).devices
    are_new = all(one.pid not in before and one.state == "ready" for one in devices)
    return are_new and {one.device for one in usage(daemon, "both").engines} == {0, 1}


def pids_of(daemon: PrivateDaemon) -> list[int]:
    """The processes of the first device by rank."""
    leader = ps(daemon).devices[0].pid
    assert leader is not None
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    followers = [
        int(pid) for pid in children if b"follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(followers) == NUM_RANKS - 1
    return [leader, *followers]
