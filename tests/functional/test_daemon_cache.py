"""A model cache that holds fewer snapshots than there are models: all of them answer all the
same."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import CachedModel, CacheInfo
from gpupoold.errors import Refused
from gpupoold.memory.libc import NO_NODE, node_bytes
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    QWEN2,
    QWEN3,
    Answer,
    Background,
    api_client,
    ask,
    check,
    child,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    usage,
    weight_bytes,
)
from tests.functional.metrics_tools import value

MODELS = (LLAMA, QWEN2, QWEN3)
PROMPT = "What was on the disk is back in memory"


@pytest.fixture(scope="module")
def checkpoints(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Copies, one of which a test damages."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in MODELS:
        shutil.copytree(tiny_models[name], folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def daemon(
    device_bytes: int, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """The three models, with room for the snapshots of two of them."""
    cache_bytes = int(2.5 * max(weight_bytes(path) for path in checkpoints.values()))
    memory = f'[memory]\nmodel_cache = {cache_bytes}\nsnapshot_files = "1GiB"\n'
    with private_daemon(
        emulated_config(device_bytes) + memory, tmp_path_factory.mktemp("cache")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(daemon: PrivateDaemon, checkpoints: dict[str, Path]) -> dict[str, Answer]:
    """What the models answer just after they were loaded."""

    async def ask_now(name: str) -> Answer:
        async with api_client(daemon.http_url) as api:
            return await ask(api, name, PROMPT)

    answers = {}
    for name, path in checkpoints.items():
        daemon.add_model(name, path, **LOAD_OPTIONS)
        answers[name] = asyncio.run(ask_now(name))
    return answers


@pytest.fixture(params=[pytest.param("checkpoints", marks=pytest.mark.slow), "snapshot-files"])
def lose_files(request: pytest.FixtureRequest, daemon: PrivateDaemon) -> Callable[[], None]:
    """Call it to have the next snapshot come from a checkpoint, in one of two runs of a test."""

    def lose() -> None:
        if request.param == "checkpoints":
            for file in (daemon.log_path.parent / "state" / "snapshots").glob("*.snapshot"):
                file.unlink()

    return lose


@pytest.fixture
async def api(daemon: PrivateDaemon, expected: dict[str, Answer]) -> AsyncIterator[AsyncOpenAI]:
    """The official client; in the end nothing is live, and all books agree."""
    async with api_client(daemon.http_url) as client:
        yield client
    await eventually(lambda: not ps(daemon).requests)
    check(daemon)
    await eventually(lambda: num_snapshots(daemon) == len(in_host(daemon)))


def cached(daemon: PrivateDaemon) -> dict[str, CachedModel]:
    """What ``gpupool cache ls`` tells of each model."""
    with daemon.client() as client:
        info, status = client.cache(), client.status()
    assert status.model_cache_limit_bytes == info.host_limit_bytes
    assert info.host_bytes <= info.host_limit_bytes
    return {model.name: model for model in info.models}


def in_host(daemon: PrivateDaemon) -> set[str]:
    return {name for name, model in cached(daemon).items() if model.state == "host"}


def is_live(daemon: PrivateDaemon, model: str) -> bool:
    return any(one.model == model for one in ps(daemon).requests)


def num_snapshots(daemon: PrivateDaemon) -> int:
    """Snapshots whose memory the worker really has, whatever anybody says."""
    maps = Path(f"/proc/{child(daemon, 'worker').pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "gpupool-snapshot" in line})


async def test_all_answer_in_turn(
    daemon: PrivateDaemon,
    api: AsyncOpenAI,
    expected: dict[str, Answer],
    lose_files: Callable[[], None],
) -> None:
    for name in (*MODELS, *MODELS):
        lose_files()
        assert await ask(api, name, PROMPT) == expected[name]
        assert name in in_host(daemon)
        assert len(in_host(daemon)) == 2
    with daemon.client() as client:
        assert {model.state for model in client.models()} == {"ready"}


async def test_metrics_tell_what_that_costs(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    """Asked in a circle, each finds that its snapshot is the one that had to go."""
    counted: tuple[tuple[str, dict[str, str]], ...] = (
        ("gpupool_model_cache_misses_total", {}),
        ("gpupool_model_cache_evictions_total", {}),
        ("gpupool_switches_total", {"kind": "cold"}),
        ("gpupool_switch_seconds_count", {"kind": "cold"}),
    )
    before = [value(daemon, name, **labels) or 0 for name, labels in counted]
    for name in (*MODELS, *MODELS):
        await ask(api, name, PROMPT, 2)
    for (name, labels), was in zip(counted, before, strict=True):
        await eventually(lambda n=name, o=labels, w=was: (value(daemon, n, **o) or 0) >= w + 3)
    for stage in ("map", "weights"):
        assert value(daemon, "gpupool_switch_stage_seconds_total", stage=stage)
    assert value(daemon, "gpupool_device_turn_seconds_total", model=LLAMA)


async def test_all_answer_at_once(api: AsyncOpenAI, expected: dict[str, Answer]) -> None:
    answers = await asyncio.gather(*(ask(api, name, PROMPT) for name in MODELS * 3))
    assert answers == [expected[name] for name in MODELS * 3]


async def test_ls_tells_the_truth(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    for name in MODELS:
        await ask(api, name, PROMPT, 2)
    await eventually(lambda: all(row.is_saved for row in cached(daemon).values()))
    info = CacheInfo.model_validate_json(cli(daemon, "cache", "ls", "--json").stdout)
    rows = {row.name: row for row in info.models}
    # The snapshot that went for the last one is of the model that was used least recently.
    states = {name: row.state for name, row in rows.items()}
    assert states == {LLAMA: "disk", QWEN2: "host", QWEN3: "host"}
    assert rows[LLAMA].snapshots[0].nodes == []
    for name in (QWEN2, QWEN3):
        [node] = rows[name].snapshots[0].nodes
        assert node in {NO_NODE, *node_bytes()}
    used = [rows[name].last_used_at or 0.0 for name in MODELS]
    assert used == sorted(used)
    assert info.host_bytes == sum(rows[name].num_bytes for name in (QWEN2, QWEN3))
    assert info.disk_bytes == sum(row.num_bytes for row in info.models)
    text = cli(daemon, "cache", "ls").stdout
    assert [line.split()[0] for line in text.splitlines()[1:4]] == list(MODELS)


@pytest.mark.slow
async def test_a_model_in_flight_is_never_dropped(
    daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]
) -> None:
    long = Background(api, LLAMA, PROMPT)
    await long.started()
    num_looks = 0
    for name in (LLAMA, QWEN2, QWEN3, QWEN2):
        assert await ask(api, name, PROMPT) == expected[name]
        dropped = await asyncio.to_thread(cli, daemon, "cache", "drop", LLAMA)
        snapshots = in_host(daemon)
        if is_live(daemon, LLAMA):  # and so it was before
            num_looks += 1
            assert dropped.returncode == 5
            assert "live requests" in dropped.stderr
            assert LLAMA in snapshots
    assert num_looks
    answer = await long.finished()
    assert answer.token_ids[: len(expected[LLAMA].token_ids)] == expected[LLAMA].token_ids


async def test_a_request_waits_until_there_is_room(
    daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]
) -> None:
    busy = [Background(api, name, PROMPT, 200) for name in (LLAMA, QWEN2)]
    for stream in busy:
        await stream.started()
    waiting = asyncio.create_task(ask(api, QWEN3, PROMPT))
    leaving = asyncio.create_task(ask(api, QWEN3, "not wanted any more"))
    await eventually(lambda: sum(one.model == QWEN3 for one in ps(daemon).requests) == 2)
    leaving.cancel()
    await eventually(lambda: sum(one.model == QWEN3 for one in ps(daemon).requests) < 2)
    assert await waiting == expected[QWEN3]
    for stream in busy:
        await stream.finished()


@pytest.mark.slow
async def test_pins(daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]) -> None:
    assert cli(daemon, "cache", "warm", LLAMA).returncode == 0
    assert cli(daemon, "cache", "pin", LLAMA).returncode == 0
    for name in (QWEN2, QWEN3, QWEN2):
        assert await ask(api, name, PROMPT) == expected[name]
        assert in_host(daemon) == {LLAMA, name}
    refused = cli(daemon, "cache", "drop", LLAMA)
    assert refused.returncode == 5
    assert f"`gpupool cache unpin {LLAMA}`" in refused.stderr
    assert cli(daemon, "cache", "pin", QWEN2).returncode == 0
    assert cli(daemon, "cache", "pin", QWEN3).returncode == 5
    with pytest.raises(openai.APIError, match=r"could not be warmed.* are pinned"):
        await ask(api, QWEN3, PROMPT)
    with daemon.client() as client:
        assert ("warm_failed", QWEN3) in {(one.kind, one.subject) for one in client.events()}
    for name in (LLAMA, QWEN2):
        assert cli(daemon, "cache", "unpin", name).returncode == 0
    assert await ask(api, QWEN3, PROMPT) == expected[QWEN3]
    assert in_host(daemon) == {QWEN2, QWEN3}


async def test_drop_and_warm(
    daemon: PrivateDaemon,
    api: AsyncOpenAI,
    expected: dict[str, Answer],
    lose_files: Callable[[], None],
) -> None:
    lose_files()
    for name in MODELS:
        assert cli(daemon, "cache", "drop", name).returncode == 0
    assert in_host(daemon) == set()
    await eventually(lambda: num_snapshots(daemon) == 0)
    assert json.loads(cli(daemon, "status", "--json").stdout)["model_cache_bytes"] == 0
    done = cli(daemon, "cache", "warm", QWEN2)
    assert (done.returncode, done.stdout) == (0, "")
    assert in_host(daemon) == {QWEN2}
    assert await ask(api, QWEN2, PROMPT) == expected[QWEN2]


@pytest.mark.slow
async def test_a_model_that_cannot_be_warmed(
    daemon: PrivateDaemon,
    api: AsyncOpenAI,
    checkpoints: dict[str, Path],
    expected: dict[str, Answer],
) -> None:
    config = checkpoints[QWEN3] / "config.json"
    text = config.read_text()
    assert cli(daemon, "cache", "drop", QWEN3).returncode == 0
    config.unlink()  # a checkpoint that has changed: a saved snapshot is not of this one
    try:
        asked = [asyncio.create_task(ask(api, QWEN3, PROMPT)) for _ in range(3)]
        for task in asked:
            with pytest.raises(openai.APIError, match=f"{QWEN3} could not be warmed"):
                await task
        await eventually(lambda: cli(daemon, "show", QWEN3).stdout.count("failed") == 1)
        assert await ask(api, QWEN2, PROMPT) == expected[QWEN2]
    finally:
        config.write_text(text)
    assert cli(daemon, "cache", "warm", QWEN3).returncode == 0
    assert await ask(api, QWEN3, PROMPT) == expected[QWEN3]


@pytest.mark.slow
async def test_a_worker_that_dies(
    daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]
) -> None:
    """What runs, or waits for room, when the worker dies is answered when it is back."""
    busy = [Background(api, name, PROMPT) for name in (LLAMA, QWEN2)]
    for stream in busy:
        await stream.started()
    waiting = asyncio.create_task(ask(api, QWEN3, PROMPT))
    await eventually(lambda: is_live(daemon, QWEN3))
    child(daemon, "worker").kill()
    assert await waiting == expected[QWEN3]
    for name, stream in zip((LLAMA, QWEN2), busy, strict=True):
        answer, known = await stream.finished(), expected[name].token_ids
        assert answer.token_ids[: len(known)] == known
        assert len(answer.token_ids) == LONG
    await eventually(lambda: {row.state for row in ps(daemon).models} == {"ready"}, 60)
    answers = await asyncio.gather(*(ask(api, name, PROMPT) for name in MODELS))
    assert answers == [expected[name] for name in MODELS]


async def test_adding_and_removing(
    daemon: PrivateDaemon, api: AsyncOpenAI, checkpoints: dict[str, Path]
) -> None:
    """A model that is added takes the room of others; one that is removed gives it back."""
    with daemon.client() as client:
        client.pin(LLAMA)
    daemon.add_model("fourth", checkpoints[QWEN2], **LOAD_OPTIONS)
    assert "fourth" in in_host(daemon)
    assert (await ask(api, "fourth", PROMPT, 4)).token_ids
    assert cli(daemon, "rm", "fourth").returncode == 0
    assert "fourth" not in cached(daemon)
    assert cli(daemon, "cache", "unpin", LLAMA).returncode == 0


async def test_an_unloaded_model_leaves_devices_and_host_memory(
    daemon: PrivateDaemon, api: AsyncOpenAI, expected: dict[str, Answer]
) -> None:
    # What is freed is told from the device's latest report.
    async def is_resident() -> bool:
        return usage(daemon, QWEN3).weights_resident_bytes > 0

    assert await ask(api, QWEN3, PROMPT) == expected[QWEN3]
    await eventually(is_resident)
    with daemon.client() as client:
        client.pin(QWEN3)
        with pytest.raises(Refused, match="is pinned"):
            client.unload(QWEN3)
        kept = client.unload(QWEN3, keep_host=True)
        assert (kept.device_bytes > 0, kept.host_bytes) == (True, 0)
        client.pin(QWEN3, is_pinned=False)
    await eventually(lambda: usage(daemon, QWEN3).weights_resident_bytes == 0)
    assert usage(daemon, QWEN3).cached_bytes > 0
    assert await ask(api, QWEN3, PROMPT) == expected[QWEN3]
    await eventually(is_resident)
    with daemon.client() as client:
        freed = client.unload(QWEN3)
    assert min(freed.device_bytes, freed.host_bytes) > 0
    await eventually(lambda: usage(daemon, QWEN3).weights_resident_bytes == 0)
    now = usage(daemon, QWEN3)
    assert (now.cached_bytes, now.kv_resident_bytes, now.state) == (0, 0, "ready")
    check(daemon)
    assert await ask(api, QWEN3, PROMPT) == expected[QWEN3]
