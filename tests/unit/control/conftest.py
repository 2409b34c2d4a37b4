"""What the control plane stands on: a registry and a history in a database of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, History, Registry


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with await Database.open(tmp_path / DATABASE_NAME) as opened:
        yield opened


@pytest_asyncio.fixture
async def history(database: Database) -> AsyncIterator[History]:
    kept = History(database, flush_interval_s=60)
    await kept.start()
    yield kept
    await kept.stop()


@pytest.fixture
def registry(database: Database) -> Registry:
    return Registry(database)
