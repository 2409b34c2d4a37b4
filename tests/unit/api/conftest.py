"""A client for the fake daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpupoold.api.client import AdminClient
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[AdminClient]:
    """A client of ``daemon``."""
    with AdminClient(daemon.socket_path) as opened:
        yield opened
