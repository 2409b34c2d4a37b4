"""Requests that go from device to device while they are answered: nobody can tell."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    MIXTRAL,
    Background,
    api_client,
    ask,
    check_all,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    set_roles,
    undisturbed,
    until,
    weight_bytes,
)

MODELS = (LLAMA, MIXTRAL)
NUM_DEVICES = 2


@pytest.fixture(scope="module")
def daemon(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Two devices, each with room for one model and a half."""
    num_bytes = int(1.7 * max(weight_bytes(tiny_models[name]) for name in MODELS))
    config = emulated_config(num_bytes) * NUM_DEVICES
    with private_daemon(config, tmp_path_factory.mktemp("moves")) as daemon:
        for name in MODELS:
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        until(lambda: all(one.state == "ready" for one in ps(daemon).models), 60)
        yield daemon


@pytest.fixture
async def api(daemon: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    """A client; in the end nobody has lost or kept anything."""
    set_roles(daemon, "mixed", "mixed")
    async with api_client(daemon.http_url) as client:
        yield client
    until(lambda: not ps(daemon).requests)
    set_roles(daemon, "mixed", "mixed")
    until(lambda: all(row.kv_host_bytes == 0 for row in ps(daemon).devices))
    check_all(daemon)


def prompts(num_prompts: int, seed: int) -> list[tuple[str, str]]:
    """Models and prompts of all lengths, up to half of what fits."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices("abcdefgh", k=rng.randrange(1, 220))) for _ in range(num_prompts)]
    return [(rng.choice(MODELS), text) for text in texts]


@pytest.mark.slow
async def test_prompts_on_one_device_and_answers_on_the_other(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    asked = prompts(12, seed=1)
    expected = await undisturbed(api, asked, 60)
    set_roles(daemon, "prefill", "decode")
    before = [row.num_steps for row in ps(daemon).devices]
    answers = await asyncio.gather(*(ask(api, model, text, 60) for model, text in asked))
    assert answers == expected
    steps = [row.num_steps - old for row, old in zip(ps(daemon).devices, before, strict=True)]
    assert steps[0] < steps[1]
    assert cli(daemon, "ps").stdout.count("prefill") == 1


@pytest.mark.slow
async def test_answers_follow_roles_and_drains(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    asked = prompts(6, seed=2)
    num_tokens = 250
    expected = await undisturbed(api, asked, num_tokens)
    streams = [Background(api, model, text, num_tokens) for model, text in asked]
    for stream in streams:
        await stream.started()
    with daemon.client() as client:
        for number in itertools.islice(itertools.cycle(range(NUM_DEVICES)), 12):
            await asyncio.to_thread(client.drain, number)
            assert client.ps().devices[number].num_requests == 0
            client.undrain(number)
    assert [await stream.finished() for stream in streams] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "extra_body": {"structured_outputs": {"regex": "(ab?c|d[0-9]){12,40}"}}},
    ],
    ids=["seed", "penalties", "logprobs", "stop", "grammar"],
)
async def test_all_that_a_request_is_goes_with_it(
    daemon: PrivateDaemon, api: AsyncOpenAI, sampling: dict[str, Any]
) -> None:
    async def answer() -> Any:
        done = await api.completions.create(
            model=LLAMA, prompt="a b c d " * 30, max_tokens=40, **sampling
        )
        [choice] = done.choices
        return choice

    alone = await answer()
    set_roles(daemon, "prefill", "decode")
    moved = await answer()
    assert (moved.text, moved.finish_reason) == (alone.text, alone.finish_reason)
    if alone.logprobs is not None:
        assert moved.logprobs.tokens == alone.logprobs.tokens
        # The second prompt finds a cached prefix: a shorter prefill may round otherwise.
        expected = pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
        assert moved.logprobs.token_logprobs == expected


async def test_a_client_that_leaves_on_the_way_leaves_nothing(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    set_roles(daemon, "prefill", "decode")
    for index in range(8):
        stream = await api.completions.create(
            model=MODELS[index % 2], prompt=f"gone {index} " * 40, max_tokens=500, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
    await eventually(lambda: not ps(daemon).requests)


def test_a_role_that_there_is_not_is_refused(daemon: PrivateDaemon) -> None:
    assert cli(daemon, "role", "set", "0", "nothing").returncode == 2
    done = cli(daemon, "role", "set", "7", "decode")
    assert done.returncode == 2
    assert "the devices are 0 to 1" in done.stderr


@pytest.mark.slow
async def test_under_aegaeon_every_answer_moves(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config = emulated_config(4 * weight_bytes(tiny_models[LLAMA])) * NUM_DEVICES
    asked = [(LLAMA, text) for _, text in prompts(6, seed=3)]
    with private_daemon(config + '[scheduling]\npolicy = "aegaeon"\n', tmp_path) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        async with api_client(daemon.http_url) as api:
            # The policy gives roles a second after it has something to do.
            stream = Background(api, LLAMA, "while roles are given", LONG)
            await eventually(
                lambda: [row.role for row in ps(daemon).devices] == ["prefill", "decode"]
            )
            await stream.finished()
            together = await asyncio.gather(*(ask(api, *one, 60) for one in asked))
            assert together == await undisturbed(api, asked, 60)
        assert all(row.num_steps for row in ps(daemon).devices)
        check_all(daemon)
