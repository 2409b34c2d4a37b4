"""Grammars on a daemon with a real worker: hostile ones end nothing, others are kept to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from benchmarks.private_daemon import PrivateDaemon
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


def costly(pool: PrivateDaemon, letter: str, **more: Any) -> dict[str, Any]:
    """A request whose grammar is cheap in all walks of the checker, and costly for its client."""
    asked = {"model": MODEL, "prompt": letter, "add_special_tokens": False}
    token_ids = httpx.post(f"{pool.http_url}/tokenize", json=asked, timeout=60).json()["tokens"]
    rules = f'root ::= [a-z]{{1,3000}} | "{letter}" z{{1,1000}}\nz ::= y{{1,1000}}\n'
    rules += 'y ::= x{1,1000}\nx ::= " " | "  "'
    return {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 200,
        "logit_bias": {str(token_ids[-1]): 100},
        "structured_outputs": {"grammar": rules},
    } | more


def num_past(pool: PrivateDaemon) -> int:
    with pool.client() as client:
        return len(client.past_requests(MODEL, 3600.0, 1000))


async def answer_of_repeated(http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Repeat a request as its refusal says while it met other costly grammars in a step."""
    for _ in range(5):
        answer = await http.post("/v1/completions", json=body)
        if "repeat the request" not in answer.text:
            break
    return answer


def is_over_bound(message: str) -> bool:
    return message.startswith("The grammar ") and "CPU time" in message and "bound" in message


async def test_costly_grammar_ends_its_request_alone(pool: PrivateDaemon, api: AsyncOpenAI) -> None:
    """Streams of the same batch, and of another model of the device, have their exact tokens."""
    pids, worker = frontend_pids(pool), child(pool, "worker")
    asked: list[dict[str, Any]] = [
        {"model": name, "prompt": "hello", "max_tokens": 120, "temperature": 0, "seed": 1}
        for name in MODELS[:2]
    ]
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20}
    asked.append(asked[0] | {"extra_body": {"structured_outputs": {"json": schema}}})
    alone = [(await api.completions.create(**one)).choices[0].text for one in asked]
    async with httpx.AsyncClient(base_url=pool.http_url, timeout=120) as client:
        beside = [asyncio.create_task(api.completions.create(**one)) for one in asked]
        whole, streamed, several = await asyncio.gather(
            answer_of_repeated(client, costly(pool, "Q")),
            answer_of_repeated(client, costly(pool, "W", stream=True)),
            answer_of_repeated(client, costly(pool, "K", n=8, temperature=1)),
        )
        assert [(await one).choices[0].text for one in beside] == alone
        for answer in (whole, several):
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert is_over_bound(error["message"]), error
            assert error["code"] == "grammar_over_bound"
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        [error] = [json.loads(one)["error"] for one in events if '"error"' in one]
        assert is_over_bound(error["message"]), error
        # Both frontends know the grammar now, and no worker gets the request.
        num_ended = num_past(pool)
        for letter in "QWK":
            for _ in range(4):
                again = await client.post("/v1/completions", json=costly(pool, letter))
                assert again.status_code == 400
                assert is_over_bound(again.json()["error"]["message"])
        assert num_past(pool) == num_ended
    assert frontend_pids(pool) == pids
    assert worker.is_running()


def test_rule_that_derives_itself_twice_is_refused(pool: PrivateDaemon) -> None:
    literal = "the quick brown fox jumps over the lazy dog " * 2
    rules = f'root ::= "{literal}" x\nx ::= " " x " " | " " | x x'
    for structured in ({"grammar": rules}, {"grammar": 'start: x\nx: x x | "a"'}):
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 200}
        body |= {"structured_outputs": structured}
        answer = httpx.post(f"{pool.http_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "the rule `x` derives itself twice in a row" in answer.json()["error"]["message"]
