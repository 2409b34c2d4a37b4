"""Answers of quantized models and of models with drafts survive moves and the ends of workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    Background,
    api_client,
    ask,
    check_all,
    cli,
    emulated_config,
    private_daemon,
    ps,
    undisturbed,
    until,
)
from tests.functional.metrics_tools import value
from tests.functional.processor import HAS_AMX

pytestmark = pytest.mark.slow

NUM_DEVICES = 2
NUM_TOKENS = 100
SPECULATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("tiny-llama-calm", {"prompt_lookup_max": 3, "prompt_lookup_min": 2}),
    "eagle": ("tiny-llama-calm", {"model": "tiny-llama-calm-eagle"}),
    "eagle3": ("tiny-qwen2-calm", {"model": "tiny-qwen2-calm-eagle3"}),
    "mtp": ("tiny-mimo-calm", {}),
}
"""Of each method the model, and more options; a drafter is in another folder beside it."""
QUANTIZED = {"gptq": "float16", "w8a8": "bfloat16" if HAS_AMX else "float32"}
ASKED = [(model, f"{model} is asked " * 5) for model in (*SPECULATIVE, *QUANTIZED)]


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, project_env: dict[str, str]
) -> Iterator[PrivateDaemon]:
    """Two devices, both with room for two of six models."""
    folder = tmp_path_factory.mktemp("kinds")
    make: dict[str, Any] = {"env": project_env, "check": True}
    subprocess.run([sys.executable, "-m", "scripts.tiny_drafter", str(folder)], **make)
    quantize = [sys.executable, "-m", "scripts.tiny_quantized", str(folder), "--format"]
    subprocess.run([*quantize, *QUANTIZED], **make)
    with private_daemon(emulated_config(28 << 20) * NUM_DEVICES, folder / "daemon") as daemon:
        for method, (model, more) in SPECULATIVE.items():
            options: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, **more}
            if "model" in options:
                options["model"] = str(folder / options["model"])
            engine = {"speculative_config": json.dumps(options)}
            path = folder / model
            daemon.add_model(method, path, dtype="float32", max_model_len=512, engine=engine)
        for name, dtype in QUANTIZED.items():
            daemon.add_model(name, folder / f"tiny-llama-{name}", dtype=dtype, max_model_len=512)
        until(lambda: all(one.state == "ready" for one in ps(daemon).models), 60)
        yield daemon


@pytest.fixture
async def api(daemon: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    """A client; in the end nobody has lost or kept anything."""
    async with api_client(daemon.http_url) as client:
        yield client
    until(lambda: not ps(daemon).requests)
    check_all(daemon)


async def test_answers_follow_drains(daemon: PrivateDaemon, api: AsyncOpenAI) -> None:
    expected = await undisturbed(api, ASKED, NUM_TOKENS)
    streams = [Background(api, model, text, NUM_TOKENS) for model, text in ASKED]
    for stream in streams:
        await stream.started()
    with daemon.client() as client:
        for number in itertools.islice(itertools.cycle(range(NUM_DEVICES)), 4):
            await asyncio.to_thread(client.drain, number)
            client.undrain(number)
    assert [await stream.finished() for stream in streams] == expected


async def test_answers_go_on_after_a_worker_has_died(
    daemon: PrivateDaemon, api: AsyncOpenAI
) -> None:
    expected = await undisturbed(api, ASKED, NUM_TOKENS)
    streams = [Background(api, model, text, NUM_TOKENS) for model, text in ASKED]
    for stream in streams:
        await stream.started()
    [pid, *_] = [row.pid for row in ps(daemon).devices if row.num_requests]
    assert pid is not None
    subprocess.run(["kill", "-9", str(pid)], check=True)
    assert [await stream.finished() for stream in streams] == expected
    until(lambda: all(row.state == "ready" for row in ps(daemon).devices), 60)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
async def test_acceptance_is_shown(daemon: PrivateDaemon, api: AsyncOpenAI, method: str) -> None:
    await ask(api, method, "how many of the drafts are right?", 100)
    with daemon.client() as client:
        usage = client.model(method).usage
        assert client.model("gptq").usage is not None
        assert client.model("gptq").usage.drafts is None  # type: ignore[union-attr]
    assert usage is not None
    assert usage.drafts is not None
    assert 1.2 < usage.drafts.acceptance_length < 4
    assert (
        f"{usage.drafts.acceptance_length:.2f} tokens per step"
        in cli(daemon, "show", method).stdout
    )
    accepted = value(daemon, "gpupool_accepted_draft_tokens_total", model=method)
    assert accepted == usage.drafts.num_accepted_tokens
    assert value(daemon, "gpupool_draft_tokens_total", model="gptq") is None
