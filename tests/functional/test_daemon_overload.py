"""A daemon with small bounds that is asked for more: simulated devices, the official client."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.domain import Event
from tests.functional.daemon_tools import api_client, cli, ps, sim_daemon, until, usage

ONE, TWO = "one", "two"
PER_MODEL, IN_ALL = 6, 9
DEVICE = '[[device]]\nkind = "sim"\ngpu = "A10"\n\n[memory]\nmodel_cache = 0\n'
LIMITS = f"""
[limits]
max_live_requests_per_model = {PER_MODEL}
max_live_requests = {IN_ALL}
"""
# A step of the model takes some 30 ms there: seconds, in which all others have come.
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("overload")
    with sim_daemon(DEVICE + LIMITS, folder, (ONE, TWO), frontends=2) as daemon:
        yield daemon


@pytest.fixture
def box(running: PrivateDaemon) -> Iterator[PrivateDaemon]:
    yield running
    until(lambda: not ps(running).requests)
    assert all(row.num_live == 0 for row in ps(running).models)


def body(model: str, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": "to be", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return asked | more


def refused_events(daemon: PrivateDaemon) -> list[Event]:
    with daemon.client() as client:
        return [event for event in client.events() if event.kind == "refused"]


async def flood(daemon: PrivateDaemon, count: int, **more: Any) -> list[httpx.Response]:
    """So many requests for one model at once."""
    async with httpx.AsyncClient(base_url=daemon.http_url, timeout=120) as http:
        asked = (http.post("/v1/completions", json=body(ONE, **more)) for _ in range(count))
        return await asyncio.gather(*asked)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_more_than_the_bound_are_taken(box: PrivateDaemon, stream: bool) -> None:
    num_refused = usage(box, ONE).refused
    answers = asyncio.run(flood(box, 40, stream=stream))
    assert Counter(answer.status_code for answer in answers) == {200: PER_MODEL, 429: 34}
    refused = [answer for answer in answers if answer.status_code == 429]
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert usage(box, ONE).refused == num_refused + 34


def test_samples_count_one_by_one(box: PrivateDaemon) -> None:
    """The samples of requests that arrive at once would be admitted by turns."""
    more = {"n": PER_MODEL // 2}

    async def run() -> tuple[list[httpx.Response], httpx.Response]:
        first = asyncio.create_task(flood(box, 2, **more))
        await asyncio.to_thread(until, lambda: len(ps(box).requests) == PER_MODEL)
        [late] = await flood(box, 1, **more)
        return await first, late

    answers, late = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(len(answer.json()["choices"]) == 3 for answer in answers)
    assert late.status_code == 429
    [never] = asyncio.run(flood(box, 1, n=PER_MODEL + 1))
    assert never.status_code == 400
    assert "7 answers" in never.text


@pytest.mark.slow
def test_all_models_share_the_bound_of_all(box: PrivateDaemon) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=box.http_url, timeout=120) as http:
            asked = [
                http.post("/v1/completions", json=body(name)) for name in (ONE, TWO) * PER_MODEL
            ]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    assert Counter(asyncio.run(run())) == {200: IN_ALL, 429: 2 * PER_MODEL - IN_ALL}


@pytest.mark.slow
def test_who_waits_as_long_as_told_is_served(box: PrivateDaemon) -> None:
    """OpenAI's client does so by itself; three times it may be told that it is still full."""

    async def ask(api: AsyncOpenAI) -> str | None:
        answer = await api.completions.create(
            model=ONE, prompt="to be", max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].finish_reason

    async def run() -> list[str | None]:
        async with AsyncOpenAI(
            base_url=f"{box.http_url}/v1", api_key="none", max_retries=3
        ) as patient:
            return await asyncio.gather(*(ask(patient) for _ in range(3 * PER_MODEL)))

    num_refused = usage(box, ONE).refused
    assert asyncio.run(run()) == ["length"] * 3 * PER_MODEL
    assert usage(box, ONE).refused >= num_refused + 2 * PER_MODEL


def test_official_client_without_retries_is_told(box: PrivateDaemon) -> None:
    async def run() -> None:
        async with api_client(box.http_url) as api:
            asked = (
                api.completions.create(
                    model=ONE, prompt="x", max_tokens=5, n=PER_MODEL, stream=True
                )
                for _ in range(2)
            )
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refusals = [one for one in answers if isinstance(one, openai.RateLimitError)]
            assert refusals
            for refusal in refusals:
                assert int(refusal.response.headers["retry-after"]) >= 1
            for stream in answers:
                if not isinstance(stream, BaseException):
                    assert [chunk async for chunk in stream]

    asyncio.run(run())


@pytest.mark.slow
def test_refusals_are_counted_and_recorded_once_a_minute(box: PrivateDaemon) -> None:
    before, began_s = len(refused_events(box)), time.monotonic()
    num_refused = usage(box, ONE).refused
    for _ in range(3):
        answers = asyncio.run(flood(box, 2, n=PER_MODEL))
        # Of two frontends: the samples of both may have come by turns, and neither fits then.
        assert 429 in {answer.status_code for answer in answers}
    assert usage(box, ONE).refused > num_refused
    minutes = (time.monotonic() - began_s) / 60
    assert len(refused_events(box)) - before <= 1 + minutes
    event = refused_events(box)[-1]
    assert (event.level, event.subject in (ONE, TWO)) == ("warning", True)
    assert "refused" in event.message
    shown = cli(box, "status").stdout
    assert any(line.split() == ["refused", str(num_of_all(box))] for line in shown.splitlines())
    assert "REFUSED" in cli(box, "ps").stdout


def num_of_all(box: PrivateDaemon) -> int:
    return sum(row.refused for row in ps(box).models)


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)])
def drops(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def hurried(drops: bool, tmp_path: Path) -> Iterator[PrivateDaemon]:
    """A daemon whose model promises its first token within two seconds."""
    config = f"{DEVICE}\n[limits]\ndrop_late = {str(drops).lower()}\n"
    with sim_daemon(config, tmp_path, (ONE,), ttft_s=2.0) as daemon:
        yield daemon


def test_late_requests_are_served_or_refused(hurried: PrivateDaemon, drops: bool) -> None:
    """Twelve long prompts take far longer than the first token may."""
    answers = asyncio.run(flood(hurried, 12, prompt=[5] * 3000, max_tokens=2))
    statuses = Counter(answer.status_code for answer in answers)
    row = usage(hurried, ONE)
    if not drops:
        assert statuses == {200: 12}
        assert (row.refused, row.dropped) == (0, 0)
        return
    assert statuses[200] + row.dropped == row.requests
    assert statuses[429] == row.refused >= 4
    for answer in answers:
        if answer.status_code == 429:
            assert "more than the target of 2s" in answer.json()["error"]["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 60
