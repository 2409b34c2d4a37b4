"""Grammars on a daemon with a real worker: hostile ones end nothing, others are kept to."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from gpupool_cli.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import MODELS, child, frontend_pids

DEEP = {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}
MODEL = MODELS[0]


def json_schema(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


async def text(api: AsyncOpenAI, **more: Any) -> str:
    answer = await api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=32,
        temperature=0,
        **more,
    )
    return answer.choices[0].message.content or ""


async def test_hostile_schema_during_a_stream(pool: PrivateDaemon, api: AsyncOpenAI) -> None:
    pids, worker = frontend_pids(pool), child(pool, "worker")
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 60, "temperature": 0}
    undisturbed = (await api.completions.create(**asked)).choices[0].text
    parts = []
    async for part in await api.completions.create(**asked, stream=True):
        parts.append(part.choices[0].text)
        if len(parts) == 2:
            with pytest.raises(BadRequestError, match="the bound is 8192"):
                await text(api, response_format=json_schema(DEEP))
    assert "".join(parts) == undisturbed
    assert frontend_pids(pool) == pids
    assert worker.is_running()


async def test_each_grammar_has_its_own_backend(pool: PrivateDaemon, api: AsyncOpenAI) -> None:
    """The first one is xgrammar's, which does not know ``multipleOf``."""
    assert await text(api, extra_body={"structured_outputs": {"choice": ["one"]}}) == "one"
    schema = {"type": "integer", "multipleOf": 7, "minimum": 8, "maximum": 20}
    assert await text(api, response_format=json_schema(schema)) == "14"
    assert await text(api, extra_body={"structured_outputs": {"choice": ["two"]}}) == "two"


def test_unstreamed_and_streamed_refusals_are_statuses(pool: PrivateDaemon) -> None:
    """A grammar that only compiling shows to be wrong."""
    for stream in (False, True):
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": stream}
        body |= {"structured_outputs": {"regex": "((("}}
        answer = httpx.post(f"{pool.http_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "structured_outputs"
