"""A dispatcher for the tests of requests."""

from __future__ import annotations

import pytest

from gpupool_state import History
from tests.unit.control.requests.dispatcher_bench import Bench


@pytest.fixture
def bench(history: History) -> Bench:
    return Bench(history)
