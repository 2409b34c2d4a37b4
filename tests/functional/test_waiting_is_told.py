"""Streams that wait for a first token are told their place and the estimated time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import api_client, open_stream, ps, sim_daemon, until

_CONFIG = """
[[device]]
kind = "sim"
gpu = "A10"
"""
# Prompts that keep an A10 busy for seconds.
_NUM_PROMPTS, _PROMPT_TOKENS = 3, 3900
_COMMENT = re.compile(r": gpupool waiting place=(\d+) estimate_s=(\d+\.\d)")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("waiting")
    with sim_daemon(_CONFIG, folder, ("one",), server='wait_comments = "500ms"\n') as daemon:
        yield daemon


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = [300 + (number + index) % 1000 for index in range(_PROMPT_TOKENS)]
    return {"model": "one", "prompt": prompt, "max_tokens": 1, "ignore_eos": True} | more


@contextlib.asynccontextmanager
async def busy(box: PrivateDaemon, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """The device is busy with prompts of others inside the context."""
    url = f"{box.http_url}/v1/completions"
    asked = [
        asyncio.create_task(client.post(url, json=body(number))) for number in range(_NUM_PROMPTS)
    ]
    while len(ps(box).requests) < _NUM_PROMPTS and not any(task.done() for task in asked):
        await asyncio.sleep(0.02)
    yield
    for answer in await asyncio.gather(*asked):
        answer.raise_for_status()


async def lines(box: PrivateDaemon, headers: dict[str, str] | None = None) -> list[str]:
    """The lines of a stream that waits for the others."""
    url = f"{box.http_url}/v1/completions"
    async with httpx.AsyncClient(timeout=60) as client, busy(box, client):
        asked = body(99, stream=True)
        async with client.stream("POST", url, json=asked, headers=headers) as response:
            response.raise_for_status()
            return [line async for line in response.aiter_lines()]


def test_a_waiting_stream_is_told_its_place_and_time(box: PrivateDaemon) -> None:
    found = [line for line in asyncio.run(lines(box)) if line]
    *comments, facts = [line for line in found if line.startswith(":")]
    told = [_COMMENT.fullmatch(line) for line in comments]
    assert told
    assert re.fullmatch(
        r": gpupool device=0 load_ms=\d+ queue_ms=\d+ switch_ms=\d+ prefill_ms=\d+", facts
    )
    waits = [(int(one[1]), float(one[2])) for one in told if one is not None]
    assert len(waits) == len(told)
    assert all(1 <= place <= _NUM_PROMPTS + 1 for place, _ in waits)
    assert [place for place, _ in waits] == sorted((place for place, _ in waits), reverse=True)
    # All comments come before the first event.
    assert [line.startswith(":") for line in found] == sorted(
        (line.startswith(":") for line in found), reverse=True
    )
    assert found[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_header_declines_comments(box: PrivateDaemon) -> None:
    found = asyncio.run(lines(box, {"X-Gpupool-Waiting": "off"}))
    assert not any(line.startswith(":") for line in found)
    assert "data: [DONE]" in found


@pytest.mark.parametrize("stream", [True, False])
def test_headers_tell_how_an_answer_waited(box: PrivateDaemon, stream: bool) -> None:
    asked = body(1, stream=stream, prompt=[300, 301, 302])
    answer = httpx.post(f"{box.http_url}/v1/completions", json=asked, timeout=60)
    answer.raise_for_status()
    assert answer.headers["x-gpupool-device"] == "0"
    stages = ("load", "queue", "switch", "prefill")
    assert all(int(answer.headers[f"x-gpupool-{stage}-ms"]) >= 0 for stage in stages)
    assert ":" not in answer.text[:1]


@pytest.mark.slow
def test_clients_of_the_openai_package_see_no_comments(box: PrivateDaemon) -> None:
    async def run() -> list[str]:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            api_client(box.http_url) as api,
            busy(box, client),
        ):
            stream = await open_stream(api, "one", "word " * 2000, 3)
            return [chunk.choices[0].text async for chunk in stream if chunk.choices]

    assert len(asyncio.run(run())) >= 3


@pytest.mark.slow
def test_clients_of_the_anthropic_package_see_no_comments(box: PrivateDaemon) -> None:
    import anthropic

    async def run() -> list[str]:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            anthropic.AsyncAnthropic(base_url=box.http_url, api_key="none") as api,
            busy(box, client),
        ):
            asked = api.messages.stream(
                model="one", max_tokens=3, messages=[{"role": "user", "content": "word " * 2000}]
            )
            async with asked as stream:
                return [text async for text in stream.text_stream]

    assert asyncio.run(run())


def test_a_client_that_leaves_while_it_is_told_is_cancelled(box: PrivateDaemon) -> None:
    async def run() -> None:
        url = f"{box.http_url}/v1/completions"
        async with httpx.AsyncClient(timeout=60) as client, busy(box, client):
            async with client.stream("POST", url, json=body(98, stream=True)) as response:
                async for line in response.aiter_lines():
                    if line.startswith(":"):
                        break
            until(lambda: len(ps(box).requests) <= _NUM_PROMPTS)

    asyncio.run(run())
    until(lambda: not ps(box).requests)
