"""A whole daemon with two workers on one GPU: requests go from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from unittest import mock

import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from tests.functional.daemon_tools import (
    Answer,
    Background,
    api_client,
    ask,
    check_all,
    eventually,
    ps,
    set_roles,
    undisturbed,
    until,
)
from tests.gpu.rig import (
    IS_GPU,
    LOGS,
    MODELS,
    SCALE,
    Checkpoints,
    engine_environment,
    limit_s,
    same_tokens,
)

pytestmark = [pytest.mark.gpu(emulated=True), pytest.mark.timeout(limit_s(90))]

NUM_TOKENS = 60
MAX_LEN = min(2048, SCALE.max_model_len)
# Some seconds of a stream each.
NUM_LONG = 600
BACK_S = limit_s(80)
# Tokens that may have been on their way to a client when its worker was killed.
_MOST_IN_FLIGHT = 8
_CONFIG = """
[memory]
reserve = {reserve}
model_cache = "4GiB"
kv_host = "512MiB"

[scheduling]
quota_max = "50ms"
"""


@pytest.fixture(scope="module")
def daemon(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Each worker has room for one model and a half."""
    folder = tmp_path_factory.mktemp("daemon")
    memory = int(1.7 * checkpoints.largest_bytes) + SCALE.reserve_bytes
    device = f'[[device]]\nkind = "{SCALE.kind}"\nmemory = {memory}\n'
    device += f"index = 0\npage_bytes = {SCALE.page_bytes}\n" if IS_GPU else ""
    config = 2 * device + _CONFIG.format(reserve=SCALE.reserve_bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(LOGS.watching(folder))
        environment = engine_environment(is_batch_invariant=True)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        started = stack.enter_context(private_daemon(config, folder))
        for name in MODELS:
            started.add_model(
                name, checkpoints.path(name), dtype=SCALE.dtype, max_model_len=MAX_LEN
            )
        until(lambda: all(one.state == "ready" for one in ps(started).models), BACK_S)
        yield started


@pytest.fixture
async def api(daemon: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    """A client; in the end nobody has lost or kept anything."""
    set_roles(daemon, "mixed", "mixed")
    async with api_client(daemon.http_url) as client:
        yield client
    until(lambda: not ps(daemon).requests)
    until(lambda: all(row.kv_host_bytes == 0 for row in ps(daemon).devices))
    check_all(daemon)


def prompts(num_prompts: int, seed: int) -> list[tuple[str, str]]:
    """Models, one after the other, and prompts of all lengths."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices("abcdefgh", k=rng.randrange(1, 220))) for _ in range(num_prompts)]
    return [(MODELS[index % len(MODELS)], text) for index, text in enumerate(texts)]


def same_answers(found: list[Answer], expected: list[Answer], asked: list[tuple[str, str]]) -> None:
    for one, other, (model, _) in zip(found, expected, asked, strict=True):
        same_tokens(one.token_ids, other.token_ids, model)
    assert found == expected


@pytest.mark.timeout(limit_s(240))  # with the start of the daemon
async def test_streams_over_all_models_are_as_undisturbed(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    asked = prompts(12, seed=1)
    expected = await undisturbed(api, asked, NUM_TOKENS)
    together = await asyncio.gather(*(ask(api, *one, NUM_TOKENS) for one in asked))
    same_answers(together, expected, asked)
    with daemon.client() as client:
        assert any(switch.weight_bytes for switch in client.switches(100))


async def test_prompts_on_one_worker_and_answers_on_the_other(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    asked = prompts(12, seed=2)
    expected = await undisturbed(api, asked, NUM_TOKENS)
    set_roles(daemon, "prefill", "decode")
    before = [row.num_steps for row in ps(daemon).devices]
    together = await asyncio.gather(*(ask(api, *one, NUM_TOKENS) for one in asked))
    same_answers(together, expected, asked)
    steps = [row.num_steps - old for row, old in zip(ps(daemon).devices, before, strict=True)]
    assert 0 < steps[0] < steps[1]


async def test_answers_move_with_their_kv(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    asked = prompts(3, seed=3)
    expected = await undisturbed(api, asked, NUM_LONG)
    streams = [Background(api, model, text, NUM_LONG) for model, text in asked]
    for stream in streams:
        await stream.started()
    num_migrations = 0
    with daemon.client() as client:
        for number in (0, 1, 0, 1):
            await asyncio.to_thread(client.drain, number)
            assert client.ps().devices[number].num_requests == 0
            num_migrations += sum(stream.is_running for stream in streams)
            client.undrain(number)
    assert num_migrations
    same_answers([await stream.finished() for stream in streams], expected, asked)


@pytest.mark.timeout(limit_s(150))
async def test_streams_go_on_when_a_worker_is_killed(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    asked = prompts(3, seed=4)
    expected = await undisturbed(api, asked, NUM_LONG)
    streams = [Background(api, model, text, NUM_LONG) for model, text in asked]
    for stream in streams:
        await stream.started()
    [victim, *_] = sorted(ps(daemon).devices, key=lambda row: -row.num_requests)
    assert victim.pid is not None
    assert victim.num_requests > 0
    num_sent = [len(stream.answer.token_ids) for stream in streams]
    os.kill(victim.pid, 9)
    for stream, alone, (model, text), num in zip(streams, expected, asked, num_sent, strict=True):
        answer = await stream.finished()
        assert len(answer.token_ids) == NUM_LONG
        await as_alone_or_recomputed(api, (model, text), answer, alone, num)
    await eventually(lambda: has_come_back(daemon, victim.pid), BACK_S)


async def as_alone_or_recomputed(
    api: AsyncOpenAI, asked: tuple[str, str], found: Answer, alone: Answer, num_sent: int
) -> None:
    """Fail unless the answer is as undisturbed, or goes on as a prompt with its first tokens does.

    After a kill the KV of the tokens so far is computed as that of a prompt. FlashAttention's tiles
    depend on the number of query tokens, so the last bits of such KV may differ from those of
    steps, also in vLLM's batch-invariant mode. ``num_sent`` tokens had come before the kill.
    """
    tokens, (model, text) = found.token_ids, asked
    pairs = zip(tokens, alone.token_ids, strict=True)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return
    assert IS_GPU, "float32 on the CPU has the same bits"
    assert first >= num_sent, f"{model}: token {first} differs, {num_sent} had come"
    options = {"return_token_ids": True, "ignore_eos": True}
    one = await api.completions.create(
        model=model, prompt=text, max_tokens=1, temperature=0.0, extra_body=options
    )
    prompt = (one.choices[0].model_extra or {})["prompt_token_ids"]
    for resumed_at in range(first, max(num_sent, first - _MOST_IN_FLIGHT) - 1, -1):
        rest = await api.completions.create(
            model=model,
            prompt=prompt + tokens[:resumed_at],
            max_tokens=len(tokens) - resumed_at,
            temperature=0.0,
            extra_body=options,
        )
        if (rest.choices[0].model_extra or {})["token_ids"] == tokens[resumed_at:]:
            return
    pytest.fail(f"{model}: other tokens from {first} on than alone and than as a prompt")


def has_come_back(daemon: PrivateDaemon, old_pid: int | None) -> bool:
    """Return whether both workers serve all models again, one of them as a new process."""
    now = ps(daemon)
    states = {row.state for row in now.devices} | {row.state for row in now.models}
    return states == {"ready"} and old_pid not in {row.pid for row in now.devices}
