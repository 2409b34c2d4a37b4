"""Several frontends on one socket: what ends one of them is nothing to the others' streams."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from benchmarks.bench.in_daemon import leftovers
from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    QWEN2,
    Answer,
    Background,
    api_client,
    are_frontends_ready,
    ask,
    check,
    device,
    emulated_config,
    eventually,
    frontend,
    frontend_pids,
    only_frontend,
    private_daemon,
    ps,
    until,
)

PROMPT = "who are you?"
BACK_S = 120.0
# What a client may see of a connection that was being answered when its frontend died.
CUT_OFF = {"ReadError", "RemoteProtocolError", "ReadTimeout"}


@pytest.fixture(scope="module")
def pool(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """A daemon with the defaults, and two models."""
    folder = tmp_path_factory.mktemp("pool")
    with private_daemon(emulated_config(device_bytes), folder, frontends=2) as daemon:
        for name in (LLAMA, QWEN2):
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        until(lambda: are_frontends_ready(daemon), BACK_S)
        yield daemon


class Streams:
    """Streams over one frontend without a break; each answer has to be what it is alone."""

    def __init__(self, api: AsyncOpenAI, alone: dict[str, Answer]) -> None:
        self._api = api
        self._alone = alone
        self._running = {name: self._begin(name) for name in alone}
        self.num_complete = 0

    def _begin(self, name: str) -> Background:
        return Background(self._api, name, PROMPT)

    async def started(self) -> None:
        """Return when all have had a token."""
        for stream in self._running.values():
            await stream.started()

    async def go_on(self) -> None:
        """Begin those anew that are over: on the connection of the one before."""
        for name, stream in self._running.items():
            if not stream.is_running:
                assert await stream.finished() == self._alone[name]
                self.num_complete += 1
                self._running[name] = self._begin(name)

    async def finished(self) -> None:
        """Return when all are over."""
        for name, stream in self._running.items():
            assert await stream.finished() == self._alone[name]
            self.num_complete += 1


def num_restarts(pool: PrivateDaemon) -> list[int]:
    """Of each frontend, until now."""
    with pool.client() as client:
        return [one.num_restarts for one in client.status().frontends]


async def call_all_the_time(url: str, outcomes: list[str]) -> None:
    """Open one connection after the other; each asks a model for a token."""
    body = {"model": QWEN2, "prompt": "hi", "max_tokens": 1}
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=BACK_S) as http:
            try:
                outcomes.append(str((await http.post("/v1/completions", json=body)).status_code))
            except httpx.HTTPError as error:
                outcomes.append(type(error).__name__)


@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_one_that_crashes_again_and_again_hurts_nobody_else(
    pool: PrivateDaemon, num_kills: int
) -> None:
    num_before = num_restarts(pool)
    outcomes: list[str] = []
    backs_s: list[float] = []
    async with api_client(pool.http_url) as api:
        with only_frontend(pool, 1):
            alone = {name: await ask(api, name, PROMPT, LONG) for name in (LLAMA, QWEN2)}
            streams = Streams(api, alone)
            await streams.started()
        kept_pid = frontend_pids(pool)[1]
        calling = asyncio.create_task(call_all_the_time(pool.http_url, outcomes))
        for _ in range(num_kills):
            killed = frontend(pool, 0)
            killed.send_signal(signal.SIGSEGV)
            killed_s = time.monotonic()

            async def is_back(pid: int = killed.pid) -> bool:
                await streams.go_on()
                return frontend_pids(pool)[0] not in (None, pid) and are_frontends_ready(pool)

            await eventually(is_back, BACK_S)
            backs_s.append(time.monotonic() - killed_s)
        await streams.finished()
        calling.cancel()
    print(f"back after {sorted(round(one, 2) for one in backs_s)} s; {len(outcomes)} calls")
    # Only what the one that died was answering is lost; everybody else is served all the time.
    assert len([one for one in outcomes if one in CUT_OFF]) <= num_kills
    assert set(outcomes) - CUT_OFF == {"200"}
    assert streams.num_complete >= 2
    assert frontend_pids(pool)[1] == kept_pid
    assert num_restarts(pool) == [num_before[0] + num_kills, 0]
    with pool.client() as client:
        down = [event for event in client.events() if event.kind == "frontend_down"]
    assert {(one.subject, one.message) for one in down} == {
        ("frontend-0", "ended (signal 11) and is restarted")
    }
    await eventually(lambda: not ps(pool).requests)
    assert check(pool)


async def test_crash_leaves_a_python_traceback(pool: PrivateDaemon) -> None:
    """And no native one, which takes seconds: see ``end_at_faults``."""
    crashed = frontend(pool, 0)
    crashed.send_signal(signal.SIGSEGV)
    await eventually(
        lambda: frontend_pids(pool)[0] not in (None, crashed.pid) and are_frontends_ready(pool),
        BACK_S,
    )
    log = (pool.log_path.parent / "state" / "logs" / "frontend-0.log").read_text()
    assert log.count("Fatal Python error: Segmentation fault") == num_restarts(pool)[0]
    assert "Segfault encountered" not in log


async def test_only_the_streams_of_the_one_that_dies_end(pool: PrivateDaemon) -> None:
    async with api_client(pool.http_url) as first, api_client(pool.http_url) as second:
        with only_frontend(pool, 1):
            alone = await ask(second, LLAMA, PROMPT, 300)
            stays = Background(second, LLAMA, PROMPT, 300)
            await stays.started()
        with only_frontend(pool, 0):
            ends = Background(first, LLAMA, PROMPT)
            await ends.started()
        with pool.client() as client:
            assert [one.num_live_requests for one in client.status().frontends] == [1, 1]
        frontend(pool, 0).kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await ends.finished()
        assert await stays.finished() == alone
    await eventually(lambda: not ps(pool).requests)
    await eventually(lambda: are_frontends_ready(pool), BACK_S)
    assert check(pool)


class Callers:
    """Clients that open one connection after the other, and what became of each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcomes: list[str] = []
        self.is_over = False

    async def run(self) -> None:
        """Until it is over."""
        while not self.is_over:
            async with httpx.AsyncClient(base_url=self._url, timeout=BACK_S) as http:
                try:
                    self.outcomes.append(str((await http.get("/v1/models")).status_code))
                except httpx.HTTPError as error:
                    self.outcomes.append(type(error).__name__)


async def test_a_frontend_that_dies_refuses_no_connection(pool: PrivateDaemon) -> None:
    callers = Callers(pool.http_url)
    calling = [asyncio.create_task(callers.run()) for _ in range(4)]
    async with api_client(pool.http_url) as api:
        with only_frontend(pool, 0):
            stream = Background(api, QWEN2, PROMPT, LONG)
            await stream.started()
        frontend(pool, 0).kill()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await stream.finished()
    await eventually(lambda: not ps(pool).requests)
    num_before = len(callers.outcomes)
    await eventually(lambda: len(callers.outcomes) > num_before + 20, BACK_S)
    callers.is_over = True
    await asyncio.gather(*calling)
    # Those that were being answered are cut off; no other sees more than a pause.
    cut_off = [text for text in callers.outcomes if text not in ("200", "503")]
    assert set(cut_off) <= {"ReadError", "RemoteProtocolError"}
    assert len(cut_off) <= len(calling)
    assert callers.outcomes[-1] == "200"
    with pool.client() as client:
        leftovers(client)
        downs = [event.message for event in client.events() if event.kind == "frontend_down"]
    assert device(pool).kv_host_bytes == 0
    assert check(pool)
    assert any("signal 9" in text for text in downs)
    await eventually(lambda: are_frontends_ready(pool), BACK_S)


async def test_one_step_s_outputs_are_divided(pool: PrivateDaemon) -> None:
    """Both frontends stream from the same model at once, with logprobs, which only frames have."""

    async def logprobs(api: AsyncOpenAI) -> list[float]:
        done = await api.completions.create(
            model=LLAMA, prompt=PROMPT, max_tokens=100, temperature=0, logprobs=1
        )
        found = done.choices[0].logprobs
        assert found is not None
        assert found.token_logprobs is not None
        return [one for one in found.token_logprobs if one is not None]

    async with api_client(pool.http_url) as first, api_client(pool.http_url) as second:
        for number, api in enumerate((first, second)):
            with only_frontend(pool, number):
                await ask(api, LLAMA, PROMPT, 1)  # this is the connection from now on
        asked = [logprobs(api) for api in (first, second) for _ in range(2)]
        answers = await asyncio.gather(*asked)
    assert [len(one) for one in answers] == [100] * 4
    for one in answers[1:]:
        assert one == pytest.approx(answers[0], abs=1e-3)


async def test_new_connections_are_shared_by_all(pool: PrivateDaemon) -> None:
    """Whoever is quicker accepts: no share is promised, but nobody is left out."""
    connections = [
        await asyncio.open_connection("127.0.0.1", int(pool.http_url.rpartition(":")[2]))
        for _ in range(200)
    ]
    counts = [0, 0]
    try:
        for reader, writer in connections:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
        for number in range(2):
            found = frontend(pool, number).net_connections(kind="tcp")
            counts[number] = sum(one.status == "ESTABLISHED" for one in found)
    finally:
        for _, writer in connections:
            writer.close()
    print(f"connections of each: {counts}")
    assert sum(counts) >= 200
    assert min(counts) > 0
