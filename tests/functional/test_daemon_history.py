"""What the daemon writes down, and that serving does not depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.admin.handlers import FRESH_S
from gpupoold.api.schemas import UseInfo
from tests.functional.conftest import MAX_REQUEST_ROWS
from tests.functional.daemon_tools import (
    LLAMA,
    LONG,
    MODELS,
    QWEN2,
    QWEN3,
    ask,
    cli,
    eventually,
    open_stream,
    ps,
)


@pytest.fixture
def database(pool: PrivateDaemon) -> Iterator[sqlite3.Connection]:
    """The daemon's database, opened beside it."""
    path = Path(pool.socket_path).parent.parent / "state" / "gpupool.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def rows(database: sqlite3.Connection, table: str, after_id: int = 0) -> list[dict[str, Any]]:
    found = database.execute(f"SELECT * FROM {table} WHERE id > ? ORDER BY id", (after_id,))
    return [dict(row) for row in found]


def last_id(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()[0])


async def test_requests_are_written_down(
    pool: PrivateDaemon, api: AsyncOpenAI, database: sqlite3.Connection
) -> None:
    await asyncio.sleep(1)  # what the tests before left is written
    start = last_id(database, "requests")
    answer = await ask(api, QWEN2, "write this down", 12)
    stream = await open_stream(api, QWEN3, "and this", LONG)
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: len(rows(database, "requests", start)) == 2)
    finished, left = rows(database, "requests", start)
    assert (finished["model"], finished["finish_reason"]) == (QWEN2, "length")
    assert finished["num_output_tokens"] == len(answer.token_ids) == 12
    assert finished["num_prompt_tokens"] > 0
    assert 0 < finished["ttft_s"] <= finished["total_s"]
    assert 0 <= finished["tbt_p50_s"] <= finished["tbt_p99_s"] <= finished["tbt_max_s"]
    assert 0 <= finished["num_tokens_in_time"] <= 12
    assert (left["model"], left["finish_reason"]) == (QWEN3, "abort")


async def test_use_of_the_gpu_is_written_down(
    pool: PrivateDaemon, api: AsyncOpenAI, database: sqlite3.Connection
) -> None:
    def used() -> dict[str, UseInfo]:
        with pool.client() as client:
            return {use.model: use for use in client.usage().uses}

    used()  # counts what the tests before left, unless just counted
    await asyncio.sleep(FRESH_S + 0.5)
    before = used().get(QWEN2)
    answer = await ask(api, QWEN2, "count this", 12)
    wanted = 1 + (before.num_requests if before else 0)
    await eventually(lambda: QWEN2 in used() and used()[QWEN2].num_requests == wanted)
    now = used()[QWEN2]
    assert now.num_output_tokens - (before.num_output_tokens if before else 0) == 12
    assert len(answer.token_ids) == 12
    gpu_s = now.gpu_s - (before.gpu_s if before else 0.0)
    assert 0 < gpu_s < 60
    text = cli(pool, "usage", "--csv").stdout
    assert text.splitlines()[0].startswith("model,api_key,key_name,num_requests")
    with pool.client() as client:
        [device] = client.usage().devices
    assert 0 < device.computing_s < device.seconds
    assert device.energy_j is None  # an emulated device has no sensor
    assert len(rows(database, "usage_hours")) >= 1


async def test_switches_are_written_down(
    pool: PrivateDaemon, api: AsyncOpenAI, database: sqlite3.Connection
) -> None:
    before = ps(pool)
    start = last_id(database, "switches")
    for model in MODELS:
        await ask(api, model, "switch", 2)
    num_new = ps(pool).num_switches - before.num_switches
    assert num_new >= len(MODELS) - 1
    await eventually(lambda: len(rows(database, "switches", start)) >= num_new)
    written = rows(database, "switches", start)[-num_new:]
    assert [row["model"] for row in written] == list(MODELS)[-num_new:]


async def test_requests_are_bounded(
    pool: PrivateDaemon, api: AsyncOpenAI, database: sqlite3.Connection
) -> None:
    start = last_id(database, "requests")
    num_new = MAX_REQUEST_ROWS + 20
    await asyncio.gather(*(ask(api, MODELS[i % 4], f"{i}", 1) for i in range(num_new)))
    await eventually(lambda: last_id(database, "requests") >= start + num_new)
    await eventually(lambda: len(rows(database, "requests")) <= MAX_REQUEST_ROWS)


@pytest.mark.slow
async def test_a_locked_database_does_not_stop_serving(
    pool: PrivateDaemon, api: AsyncOpenAI, database: sqlite3.Connection
) -> None:
    expected = await ask(api, LLAMA, "go on", 20)
    start = last_id(database, "requests")
    database.execute("BEGIN IMMEDIATE")
    try:
        assert await ask(api, LLAMA, "go on", 20) == expected
        refusal = await asyncio.to_thread(cli, pool, "set", LLAMA, "--tbt", "90ms")
        assert refusal.returncode == 1
        assert "locked" in refusal.stderr
        assert await ask(api, QWEN2, "go on", 20)
        assert cli(pool, "show", LLAMA).returncode == 0
    finally:
        database.execute("ROLLBACK")
    await eventually(lambda: last_id(database, "requests") >= start + 2, 40)
    changed = await asyncio.to_thread(cli, pool, "set", LLAMA, "--tbt", "100ms")
    assert changed.returncode == 0
