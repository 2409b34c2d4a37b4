"""Files and batches through the official client: answers, cancellation, restarts, other load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import Batch

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import QWEN2, QWEN3, api_client, ask, private_daemon, sim_daemon

_CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


def line(custom_id: str, model: str, prompt: str, max_tokens: int = 8, **fields: Any) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = {"custom_id": custom_id, "method": "POST", "url": _CHAT, "body": body | fields}
    return json.dumps(request)


async def begin(api: AsyncOpenAI, lines: Iterable[str]) -> Batch:
    content = "\n".join(lines).encode()
    file = await api.files.create(file=("requests.jsonl", content), purpose="batch")
    return await api.batches.create(
        input_file_id=file.id, endpoint=_CHAT, completion_window="24h", metadata={"for": "test"}
    )


async def ended(api: AsyncOpenAI, batch: Batch, timeout_s: float = 120.0) -> Batch:
    async with asyncio.timeout(timeout_s):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.2)
            batch = await api.batches.retrieve(batch.id)
    return batch


async def results(api: AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    content = await api.files.content(file_id)
    found = [json.loads(text) for text in content.text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


async def test_a_batch_of_two_models(pool: PrivateDaemon, api: AsyncOpenAI) -> None:
    prompts = {f"{model}-{k}": (model, f"prompt {k}") for model in (QWEN2, QWEN3) for k in range(8)}
    lines = [line(name, model, prompt) for name, (model, prompt) in prompts.items()]
    batch = await begin(api, [*lines, "", line("lost", "no-such-model", "hello")])
    assert batch.metadata == {"for": "test"}
    batch = await ended(api, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (17, 16, 1)
    found = await results(api, batch.output_file_id)
    assert found.keys() == prompts.keys()
    name, (model, prompt) = next(iter(prompts.items()))
    alone = await api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=8, temperature=0
    )
    assert text_of(found[name]) == alone.choices[0].message.content
    errors = await results(api, batch.error_file_id)
    assert errors["lost"]["response"]["status_code"] == 404
    assert batch.id in [one.id for one in (await api.batches.list()).data]
    assert batch.output_file_id in [one.id async for one in api.files.list()]
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert (await api.files.delete(file_id or "")).deleted
    assert (await api.batches.retrieve(batch.id)).status == "completed"


async def test_batches_count_apart(
    pool: PrivateDaemon, api: AsyncOpenAI, http: httpx.Client
) -> None:
    def tokens(name: str) -> float:
        text = http.get("/metrics").text
        key = f'gpupool_{name}_total{{model="{QWEN2}"}} '
        return float(next(row for row in text.splitlines() if row.startswith(key)).split()[-1])

    before = tokens("background_tokens"), tokens("output_tokens")
    batch = await ended(api, await begin(api, [line("one", QWEN2, "hello", 9, ignore_eos=True)]))
    assert batch.status == "completed"
    assert (tokens("background_tokens"), tokens("output_tokens")) == (before[0] + 9, before[1])


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a", QWEN2, "x"), line("a", QWEN2, "y")], "duplicate_custom_id", 2),
        ([line("a", QWEN2, "x"), "{}"], "invalid_json_line", 2),
        (["[" * 5000], "invalid_json_line", 1),
        ([line("a", QWEN2, "x", stream=True)], "stream_unsupported", 1),
        ([line("a", QWEN2, "x").replace(_CHAT, "/v1/embeddings")], "invalid_url", 1),
        ([], "empty_file", 1),
    ],
)
async def test_a_wrong_input_file(
    api: AsyncOpenAI, lines: Sequence[str], code: str, number: int
) -> None:
    batch = await ended(api, await begin(api, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, number)]


async def test_interactive_requests_do_not_wait_for_a_batch(
    pool: PrivateDaemon, api: AsyncOpenAI
) -> None:
    lines = [line(str(k), QWEN3, f"count {k}", 400, ignore_eos=True) for k in range(12)]
    batch = await begin(api, lines)
    async with asyncio.timeout(60):
        while batch.status != "in_progress":
            await asyncio.sleep(0.1)
            batch = await api.batches.retrieve(batch.id)
    await asyncio.sleep(1)
    times_s = []
    for _ in range(3):
        begun_s = time.monotonic()
        await ask(api, QWEN2, "and now me", 4)
        times_s.append(time.monotonic() - begun_s)
    assert (await api.batches.retrieve(batch.id)).status == "in_progress"
    assert max(times_s) < 10  # the batch alone takes longer
    await api.batches.cancel(batch.id)
    batch = await ended(api, batch)
    assert batch.status == "cancelled"


@pytest.mark.slow
async def test_a_batch_goes_on_after_the_daemons_death(tmp_path: Path) -> None:
    config = '[[device]]\nkind = "sim"\ngpu = "A10"\n'
    lines = [line(str(k), "one", f"count {k}", 100) for k in range(60)]
    with sim_daemon(config, tmp_path, ("one",)) as daemon:
        async with api_client(daemon.http_url) as api:
            batch = await begin(api, lines)
            async with asyncio.timeout(60):
                while not (batch.request_counts and batch.request_counts.completed > 5):
                    await asyncio.sleep(0.1)
                    batch = await api.batches.retrieve(batch.id)
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait()
    with private_daemon(config, tmp_path / "daemon") as daemon:
        async with api_client(daemon.http_url) as api:
            batch = await ended(api, batch)
            assert batch.status == "completed"
            assert batch.request_counts is not None
            assert batch.request_counts.completed == 60
            found = await results(api, batch.output_file_id)
    assert found.keys() == {str(k) for k in range(60)}
