"""A fake daemon on a real unix socket, for tests of what talks to one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Where a socket may lie: a unix socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:
        yield Path(folder) / "admin.sock"


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    """A running fake daemon without models."""
    with FakeDaemon(socket_path) as running:
        yield running
