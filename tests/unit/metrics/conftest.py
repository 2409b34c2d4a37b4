"""A pool with two GPUs that nobody has started."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, History
from gpupoold.config.file import ConfigFile
from gpupoold.config.schema import parse_settings
from gpupoold.control.control_plane import ControlPlane, build_control_plane
from gpupoold.control.operations import Configuration
from gpupoold.system.systemd import FdStore, Notifier


@pytest_asyncio.fixture
async def control_plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    folders = {name: str(tmp_path) for name in ("state_dir", "runtime_dir", "log_dir")}
    settings = parse_settings({"devices": ["cuda:0", "cuda:1"], "paths": folders}, "test")
    configuration = Configuration(ConfigFile(None, settings, frozenset()))
    async with await Database.open(tmp_path / DATABASE_NAME) as database:
        history = History(database)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store = FdStore(Notifier())
            yield await build_control_plane(configuration, database, history, listener, store)
