"""New connections while a daemon with a socket of its own stops."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx

from tests.functional.daemon_tools import Background, api_client, sim_daemon

PAGE = {"origin": "http://localhost:3000"}
CONFIG = f"""
[[device]]
kind = "sim"
gpu = "A10"
[memory]
model_cache = 0
[limits]
stop_grace = "6s"
[access]
allowed_origins = ["{PAGE["origin"]}"]
"""
NUM_TOKENS = 60
BODY = {"model": "one", "prompt": "x", "max_tokens": 2}


async def _refusals(url: str) -> list[httpx.Response]:
    """Ask on new connections until none is accepted; return the answers without tokens."""
    refusals: list[httpx.Response] = []
    async with asyncio.timeout(60):
        while True:
            try:
                async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                    answer = await http.post("/v1/completions", json=BODY, headers=PAGE)
            except httpx.TransportError:
                return refusals
            if answer.status_code != 200:
                refusals.append(answer)
            await asyncio.sleep(0.05)


async def test_new_connections_get_503_while_a_stream_ends(tmp_path: Path) -> None:
    with sim_daemon(CONFIG, tmp_path, ["one"]) as daemon:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "x"}
        with httpx.Client(base_url=daemon.http_url, headers=PAGE, timeout=60) as page:
            preflight = page.options("/v1/completions", headers=asked)
            streamed = page.post("/v1/completions", json=BODY | {"stream": True})
        for answer in (preflight, streamed):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        async with api_client(daemon.http_url) as api:
            stream = Background(api, "one", "goes on", NUM_TOKENS)
            await stream.started()
            daemon.process.send_signal(signal.SIGTERM)
            refusals = await _refusals(daemon.http_url)
            assert len((await stream.finished()).token_ids) == NUM_TOKENS
        await asyncio.to_thread(daemon.process.wait, 60)
    assert refusals
    assert {answer.status_code for answer in refusals} == {503}
    for answer in refusals:
        assert answer.headers["retry-after"]
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
    messages = {answer.json()["error"]["message"] for answer in refusals}
    assert messages == {"the server is stopping"}
