"""Requests that ask for too much, beside another client's stream, through all real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from tests.functional.daemon_tools import (
    Background,
    api_client,
    ask,
    cli,
    emulated_config,
    eventually,
    private_daemon,
    ps,
    until,
)

MODEL = "one"
CONFIG = emulated_config(256 << 20) + '\n[limits]\nmax_bytes_in_flight = "30MB"\n'
MAX_GROWTH_BYTES = 20 << 20
PROMPT, NUM_TOKENS = "a stream of somebody else", 1000
LONG = 9_800_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Hostile:
    """A request and what its refusal names."""

    path: str
    fields: dict[str, Any]
    named: str
    status: int = 400


MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
HOSTILE = {
    "a long id": Hostile(
        COMPLETIONS, {"prompt": "a", "n": 16, "request_id": "x" * 9_900_000}, "128 printable"
    ),
    "n times prompts": Hostile(COMPLETIONS, {"prompt": ["a"] * 1024, "n": 16384}, "at most 128"),
    "prompts": Hostile(COMPLETIONS, {"prompt": ["a"] * 1024}, "more than the 512"),
    "answers": Hostile(COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "10,000 answers"),
    "beams": Hostile(
        COMPLETIONS, {"prompt": ["a"] * 100, "n": 100, "use_beam_search": True}, "10,000 answers"
    ),
    "conversations": Hostile(
        f"{CHAT}/batch", {"messages": [[MESSAGE]] * 1000}, "more than the 512"
    ),
    "bytes of samples": Hostile(
        COMPLETIONS, {"prompt": "x" * 1_000_000, "n": 31}, "30,000,000 bytes", status=413
    ),
    "token ids": Hostile(COMPLETIONS, {"prompt": [7] * 3_000_000}, "310,000 values"),
    "prompt tokens": Hostile(
        COMPLETIONS, {"prompt": [[7] * 1900] * 120, "n": 5}, "1,048,576 tokens"
    ),
    "messages": Hostile(CHAT, {"messages": [MESSAGE] * 100_000}, "5,000 objects"),
    "tools": Hostile(CHAT, {"messages": [MESSAGE], "tools": [TOOL] * 100_000}, "5,000 objects"),
    "responses": Hostile("/v1/responses", {"input": [MESSAGE] * 100_000}, "5,000 objects"),
    "anthropic": Hostile(
        "/v1/messages", {"messages": [MESSAGE] * 100_000, "max_tokens": 4}, "5,000 objects"
    ),
    "fields": Hostile(
        COMPLETIONS, {"prompt": "a", **{f"k{i}": 1 for i in range(60_000)}}, "50,000 strings"
    ),
    "a text that is cut": Hostile(
        COMPLETIONS, {"prompt": "hello wor " * (LONG // 10), "truncate_prompt_tokens": 5}, "8"
    ),
    "a text to tokenise": Hostile("/tokenize", {"prompt": "é" * (LONG // 6)}, "characters"),
    "logprobs of prompts": Hostile(
        COMPLETIONS,
        {"prompt": [[7] * 1000] * 64, "prompt_logprobs": 20, "max_tokens": 1},
        "in flight",
        413,
    ),
    "logprobs of echoes": Hostile(
        COMPLETIONS, {"prompt": [[7] * 1000] * 64, "echo": True, "logprobs": 20}, "in flight", 413
    ),
    "logprobs of answers": Hostile(
        CHAT,
        {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 20, "n": 64, "max_tokens": 400},
        "100,000",
    ),
    "logprobs of ids": Hostile(
        COMPLETIONS,
        {"prompt": "a", "logprobs": 1, "logprob_token_ids": [*range(128)], "n": 64}
        | {"max_tokens": 300},
        "100,000",
    ),
    "logprobs of responses": Hostile(
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20}
        | {"max_output_tokens": 1900},
        "25,000",
    ),
    "beams with logprobs": Hostile(
        COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 64, "max_tokens": 300}, "100,000"
    ),
    "stop": Hostile(COMPLETIONS, {"prompt": "a", "stop": ["x" * 2_000_000] * 4}, "`stop`"),
    "bad words": Hostile(COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 20_000]}, "`bad_words`"),
}


@pytest.fixture(scope="module")
def box(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]
) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("hostile")
    # One frontend: each has its share of the bytes in flight.
    with private_daemon(CONFIG, folder / "daemon") as daemon:
        daemon.add_model(MODEL, tiny_models["tiny-llama"], max_model_len=2048)
        yield daemon


def post(box: PrivateDaemon, path: str, **fields: Any) -> httpx.Response:
    body = json.dumps({"model": MODEL, "max_tokens": 2, **fields})
    headers = {"content-type": "application/json"}
    return httpx.post(box.http_url + path, content=body, headers=headers, timeout=60)


def processes(box: PrivateDaemon) -> dict[int, str]:
    """The daemon and its children, by their process ids."""
    found = [psutil.Process(box.process.pid), *descendants(box)]
    return {one.pid: " ".join(one.cmdline()) for one in found}


def resident_bytes(box: PrivateDaemon) -> int:
    return int(psutil.Process(box.process.pid).memory_info().rss)


def test_all_are_refused_and_nobody_notices(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            alone = await ask(api, MODEL, PROMPT, NUM_TOKENS)
            before, rss_bytes = processes(box), resident_bytes(box)
            stream = Background(api, MODEL, PROMPT, NUM_TOKENS)
            await stream.started()
            for name, one in HOSTILE.items():
                answer = await asyncio.to_thread(post, box, one.path, **one.fields)
                assert answer.status_code == one.status, f"{name}: {answer.text[:300]}"
                assert one.named in answer.text, name
                assert len(answer.content) < 2000, name
            assert await stream.finished() == alone
            assert processes(box) == before
            await eventually(lambda: not ps(box).requests)
            assert resident_bytes(box) < rss_bytes + MAX_GROWTH_BYTES

    asyncio.run(run())


def test_what_an_engine_does_not_need_is_not_sent(box: PrivateDaemon) -> None:
    """Texts of any length that only the API sees: nothing of them is kept by the daemon."""
    rss_bytes = resident_bytes(box)
    for field in ("user", "session_id", "no_such_field"):
        assert post(box, COMPLETIONS, prompt="a", **{field: "x" * LONG}).status_code == 200, field
    for field in ("vllm_xargs", "kv_transfer_params"):
        extra = {field: {"key": "x" * LONG}}
        assert post(box, COMPLETIONS, prompt="a", n=2, **extra).status_code == 200, field
    assert resident_bytes(box) < rss_bytes + MAX_GROWTH_BYTES


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_clients_id_comes_back_and_goes_nowhere_else(box: PrivateDaemon, path: str) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    mine = f"mine-{path.count('/')}-{'x' * 100}"
    answer = post(box, path, **prompt, request_id=mine)
    assert answer.status_code == 200, answer.text
    assert answer.json()["id"].endswith(mine)
    server_id = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", server_id)
    with box.client() as client:
        until(lambda: server_id in {one.request_id for one in client.requests()})
    kept = [path for path in box.log_path.parent.rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if mine.encode() in path.read_bytes()]


def test_a_request_is_found_by_the_id_of_its_answer(box: PrivateDaemon) -> None:
    answer = post(box, CHAT, messages=[MESSAGE], n=2)
    server_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"chatcmpl-{server_id}"
    with box.client() as client:
        until(lambda: sum(server_id in one.request_id for one in client.requests()) == 2)
    shown = cli(box, "why", answer.json()["id"])
    assert shown.returncode == 0, shown.stderr
    assert server_id in shown.stdout


def test_ids_may_be_sent_twice(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=box.http_url, timeout=60) as http:
            body = {"model": MODEL, "prompt": ["a", "b"], "n": 3, "max_tokens": 8}
            asked = (
                http.post(COMPLETIONS, json=body, headers={"X-Request-Id": "same"})
                for _ in range(4)
            )
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 200, answer.text
                assert answer.json()["id"] == "cmpl-same"
                assert len(answer.json()["choices"]) == 6

    asyncio.run(run())


def test_bodies_that_do_not_fit_beside_others_are_told_to_wait(box: PrivateDaemon) -> None:
    """Of four bodies there is room for three, however they come; these three are answered."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, "user": "x" * LONG}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def read_answer(reader: asyncio.StreamReader) -> bytes:
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(re.findall(rb"content-length: (\d+)", answer.lower())[0])
        return answer + await reader.readexactly(length)

    async def send(rest: asyncio.Event) -> str:
        url = httpx.URL(box.http_url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        answering = asyncio.create_task(read_answer(reader))
        waiting = asyncio.create_task(rest.wait())
        try:
            writer.write(head + body[:-100])
            await writer.drain()
            await asyncio.wait({waiting, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                writer.write(body[-100:])
        except ConnectionError:
            pass  # refused, and the rest is not read
        try:
            return (await answering).decode()
        finally:
            waiting.cancel()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def run() -> list[str]:
        rest = asyncio.Event()
        sending = [asyncio.create_task(send(rest)) for _ in range(4)]
        await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        rest.set()
        return await asyncio.gather(*sending)

    answers = asyncio.run(run())
    assert sorted(answer.split(" ", 2)[1] for answer in answers) == ["200", "200", "200", "429"]
    [refusal] = [answer for answer in answers if " 429 " in answer.splitlines()[0]]
    assert "retry-after: 1" in refusal.lower()
    assert "30,000,000 bytes" in refusal
