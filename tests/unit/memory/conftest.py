"""A device with its pool and host cache per test; leaks fail the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.memory.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
