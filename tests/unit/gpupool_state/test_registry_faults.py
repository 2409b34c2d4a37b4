"""The registry when the disk, another program or the process itself fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest

from gpupool_state import Database, Registry
from gpupoold.domain import ModelSpec, ModelState
from gpupoold.errors import Failed

pytestmark = pytest.mark.asyncio

Act = Callable[[], Awaitable[None]]
MakeSpec = Callable[..., ModelSpec]


async def test_a_full_disk_refuses_changes_and_keeps_what_was(
    registry: Registry, make_spec: MakeSpec, fill_disk: Act, free_disk: Act
) -> None:
    before = await registry.add(make_spec("llama", "chat"))
    await fill_disk()
    with pytest.raises(Failed, match="no space left") as caught:
        await registry.add(make_spec("qwen", path="/" + "x" * 10_000))
    assert "free some space" in caught.value.hint
    with pytest.raises(Failed, match="no space left"):
        await registry.set_state("llama", ModelState.FAILED, "x" * 10_000)
    assert await registry.list() == [before]
    await free_disk()
    await registry.add(make_spec("qwen", path="/" + "x" * 10_000))


async def test_a_locked_database_refuses_changes_and_is_read(
    db: Database, registry: Registry, make_spec: MakeSpec
) -> None:
    before = await registry.add(make_spec())
    with closing(sqlite3.connect(db.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Failed, match="locked by another program"):
            await registry.remove("llama")
        assert await registry.get("llama") == before
    await registry.remove("llama")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO aliases (alias, model) VALUES ('llama', 'llama')",
        "INSERT INTO aliases (alias, model) VALUES ('new', 'nobody')",
        "INSERT INTO models SELECT 'chat', source, path, revision, dtype, max_model_len, ttft_s, "
        "tbt_s, state, error, architecture, weight_bytes, kv_bytes_per_token, "
        "loaded_max_model_len, created_at, is_pinned, engine, devices, engine_bytes, "
        "pace FROM models",
    ],
)
async def test_the_file_itself_keeps_names_apart(
    db: Database, registry: Registry, make_spec: MakeSpec, statement: str
) -> None:
    await registry.add(make_spec("llama", "chat"))
    with pytest.raises(sqlite3.IntegrityError):
        async with db.write() as tx:
            await tx.execute(statement)
