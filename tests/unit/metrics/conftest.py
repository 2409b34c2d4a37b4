"""A pool with two GPUs that nobody has started."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from gpupool_state import DATABASE_NAME, ApiKeys, Database, History, Registry
from gpupoold.config.file import ConfigFile
from gpupoold.config.schema import parse_settings
from gpupoold.control.access.keyring import Keyring
from gpupoold.control.build import build_pool
from gpupoold.control.configuration import Configuration
from gpupoold.control.control_plane import Pool
from gpupoold.system.systemd import FdStore, Notifier


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    folders = {name: str(tmp_path) for name in ("state_dir", "runtime_dir", "log_dir")}
    settings = parse_settings({"devices": ["cuda:0", "cuda:1"], "paths": folders}, "test")
    configuration = Configuration(ConfigFile(None, settings, frozenset()))
    async with await Database.open(tmp_path / DATABASE_NAME) as database:
        registry, history = Registry(database), History(database)
        keyring = Keyring(ApiKeys(database), registry, history, "")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store = FdStore(Notifier())
            yield build_pool(configuration, registry, history, listener, store, keyring)
