"""Requests that crash workers end alone; all others are answered as if undisturbed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from tests.functional import poison
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    Background,
    api_client,
    ask,
    check_all,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    undisturbed,
)

BACK_S = 120.0
NUM_TOKENS = 120
ASKED = [(name, f"bystander {n}") for name in (LLAMA, QWEN2) for n in range(2)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the plugin with which some requests crash their worker."""
    folder = tmp_path_factory.mktemp("plugin")
    poison.install(folder)
    return folder


@pytest.fixture(scope="module")
def box(
    plugin: Path,
    tiny_models: dict[str, Path],
    device_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrivateDaemon]:
    """Two devices with two models, and the plugin."""
    config = emulated_config(device_bytes, num_devices=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(plugin)
        with private_daemon(config, tmp_path_factory.mktemp("box")) as daemon:
            for name in (LLAMA, QWEN2):
                daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
            yield daemon


@pytest.fixture
async def api(box: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    async with api_client(box.http_url) as client:
        yield client


def num_deaths(daemon: PrivateDaemon) -> int:
    return len(events(daemon, "worker_down"))


def events(daemon: PrivateDaemon, kind: str) -> list[str]:
    with daemon.client() as client:
        return [event.message for event in client.events() if event.kind == kind]


async def ask_poison(api: AsyncOpenAI, seed: int, **extra: Any) -> str:
    """The error that a request gets that crashes its worker."""
    with pytest.raises(openai.APIError) as raised:
        await _read_poison(api, seed, extra)
    return str(raised.value)


async def _read_poison(api: AsyncOpenAI, seed: int, extra: dict[str, Any]) -> None:
    stream = await api.completions.create(
        model=LLAMA, prompt="poison", max_tokens=20, seed=seed, stream=True, extra_body=extra
    )
    async for _ in stream:
        pass


GRAMMAR = {"structured_outputs": {"regex": "[ab]+"}}


@pytest.mark.parametrize(
    ("seed", "extra"),
    [
        pytest.param(poison.STEP_SEED, {}, id="step"),
        pytest.param(poison.ADD_SEED, {}, id="add", marks=pytest.mark.slow),
        pytest.param(poison.GRAMMAR_SEED, GRAMMAR, id="grammar", marks=pytest.mark.slow),
    ],
)
async def test_one_request_that_crashes_workers_ends_alone(
    box: PrivateDaemon, api: AsyncOpenAI, seed: int, extra: dict[str, Any]
) -> None:
    alone = await undisturbed(api, ASKED, NUM_TOKENS)
    before = num_deaths(box)
    streams = [Background(api, name, text, NUM_TOKENS) for name, text in ASKED]
    for stream in streams:
        await stream.started()
    error = await asyncio.wait_for(ask_poison(api, seed, **extra), BACK_S)
    assert "crashed a second worker when retried alone" in error
    assert [await stream.finished() for stream in streams] == alone
    assert num_deaths(box) - before == 2, events(box, "worker_down")[before:]
    assert events(box, "model_quarantined") == []
    await eventually(lambda: {one.state for one in ps(box).devices} == {"ready"}, BACK_S)
    await eventually(lambda: {one.state for one in ps(box).models} == {"ready"}, BACK_S)
    assert await ask(api, *ASKED[0], NUM_TOKENS) == alone[0]
    await eventually(lambda: not ps(box).requests)
    check_all(box)


@pytest.mark.slow
async def test_several_at_once_among_others(box: PrivateDaemon, api: AsyncOpenAI) -> None:
    alone = await undisturbed(api, ASKED, NUM_TOKENS)
    before = num_deaths(box)
    streams = [Background(api, name, text, NUM_TOKENS) for name, text in ASKED]
    seeds = (poison.STEP_SEED, poison.ADD_SEED)
    asked = (asyncio.wait_for(ask_poison(api, seed), BACK_S) for seed in seeds)
    for error in await asyncio.gather(*asked):
        assert "crashed a second worker when retried alone" in error
    assert [await stream.finished() for stream in streams] == alone
    assert num_deaths(box) - before <= 2 * len(seeds)
    assert events(box, "model_quarantined") == []


async def test_what_happened_is_told(box: PrivateDaemon, api: AsyncOpenAI) -> None:
    if not events(box, "request_convicted"):
        await ask_poison(api, poison.STEP_SEED)
    shown = cli(box, "events").stdout
    assert f"activity: a step of {LLAMA} with" in shown
    assert "crashed a worker when retried alone" in shown
    convicted = events(box, "request_convicted")[0].split()[1]
    assert "crashed a second worker when retried alone" in cli(box, "why", convicted).stdout


@pytest.mark.slow
async def test_a_model_whose_load_crashes_is_tried_again_by_itself(
    box: PrivateDaemon, api: AsyncOpenAI, plugin: Path
) -> None:
    expected = await ask(api, *ASKED[0])
    other = Background(api, QWEN2, "other", NUM_TOKENS)
    poison.crash_loads_of(plugin, LLAMA)
    try:
        pid = ps(box).devices[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: state(box, LLAMA) == "failed", BACK_S)
    finally:
        poison.crash_loads_of(plugin, "")
    await other.finished()
    shown = cli(box, "show", LLAMA).stdout
    assert "signal 11, in the load of tiny-llama" in " ".join(shown.split())
    assert "next try at" in " ".join(shown.split())
    with pytest.raises(openai.InternalServerError, match="next try at") as refused:
        await ask(api, *ASKED[0])
    assert 1 < int(refused.value.response.headers["retry-after"]) <= 30
    await ask(api, QWEN2, "other")
    # Nobody does anything.
    await eventually(lambda: state(box, LLAMA) == "ready", BACK_S)
    assert await ask(api, *ASKED[0]) == expected
    assert events(box, "model_recovered")


def state(daemon: PrivateDaemon, model: str) -> str:
    return next(one.state for one in ps(daemon).models if one.name == model)
