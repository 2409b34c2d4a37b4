"""A fresh state database per test, and builders for what goes into it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, Registry
from gpupoold.domain import ModelName, ModelSpec, Targets
from gpupoold.errors import Failed

MakeSpec = Callable[..., ModelSpec]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / DATABASE_NAME


@pytest_asyncio.fixture
async def db(path: Path) -> AsyncIterator[Database]:
    async with await Database.open(path, busy_timeout_s=0.2) as opened:
        yield opened


@pytest.fixture
def registry(db: Database) -> Registry:
    return Registry(db, now=lambda: 1_700_000_000.0)


@pytest.fixture
def make_spec() -> MakeSpec:
    def make(name: str = "llama", *aliases: str, path: str = "/models/llama") -> ModelSpec:
        return ModelSpec(
            name=ModelName(name),
            source="meta/llama",
            path=path,
            revision="main",
            dtype="bfloat16",
            max_model_len=4096,
            targets=Targets(ttft_s=2.0, tbt_s=0.05),
            aliases=aliases,
        )

    return make


@pytest.fixture
def fill_disk(db: Database) -> Callable[[], Awaitable[None]]:
    """Leave no room for another page, as a full disk does: SQLite answers SQLITE_FULL."""

    async def fill() -> None:
        async with db.write() as tx:
            await tx.execute("CREATE TABLE IF NOT EXISTS ballast (text TEXT)")
        async with db.write() as tx:
            await tx.execute("PRAGMA max_page_count = 1")  # clamped to the present size
        for size in (4000, 400, 40, 4):
            await _fill(db, size)

    return fill


async def _fill(db: Database, size: int) -> None:
    try:
        while True:
            async with db.write() as tx:
                await tx.execute("INSERT INTO ballast VALUES (?)", ("x" * size,))
    except Failed:
        return


@pytest.fixture
def free_disk(db: Database) -> Callable[[], Awaitable[None]]:
    async def free() -> None:
        async with db.write() as tx:
            await tx.execute("PRAGMA max_page_count = 1000000")

    return free
