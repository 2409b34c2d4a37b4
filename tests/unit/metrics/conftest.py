"""A pool with two GPUs that nobody has started."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, History, Registry
from gpupoold.config import parse_settings
from gpupoold.pool.pool import Pool, build_pool


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    folders = {name: str(tmp_path) for name in ("state_dir", "runtime_dir", "log_dir")}
    settings = parse_settings({"devices": ["cuda:0", "cuda:1"], "paths": folders}, "test")
    async with await Database.open(tmp_path / DATABASE_NAME) as database:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield build_pool(settings, Registry(database), History(database), listener)
