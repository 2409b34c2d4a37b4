"""One real daemon for all tests of the whole pool: starting it takes most of their time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from tests.conftest import IMPORT_SERVER
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    MODELS,
    api_client,
    check,
    emulated_config,
    ps,
    sim_daemon,
    until,
    weight_bytes,
)
from tests.functional.import_server import ADDRESS, IMPORTED, import_server
from tests.functional.known_latency import prepare_state
from tests.support.programs import start_daemon

MAX_REQUEST_ROWS = 60
_POOL_CONFIG = """
[memory]
model_cache = {cache_bytes}

[history]
max_requests = {max_requests}
"""


@pytest.fixture(scope="session", autouse=True)
def imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """vLLM imported once for the daemons of all tests, see ``import_server.py``."""
    shared = getattr(request.config, "workerinput", {}).get(IMPORT_SERVER)
    server = contextlib.nullcontext(shared) if shared else import_server()
    with pytest.MonkeyPatch.context() as patch, server as address:
        patch.syspath_prepend(IMPORTED)
        patch.setenv(ADDRESS, address)
        yield


@pytest.fixture(scope="module", autouse=True)
def environment(imports: None) -> Iterator[None]:
    """What an engine in this process sets for itself does not reach the daemons of other modules.

    The import server forks for daemons in its own environment only.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def device_bytes(tiny_models: dict[str, Path]) -> int:
    """Memory for about one and a half models, and for the longest request of each."""
    return int(1.6 * max(map(weight_bytes, tiny_models.values())))


@pytest.fixture(scope="session")
def shared_pool(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """The daemon behind ``pool``; its model cache has room for five models."""
    sizes = [weight_bytes(tiny_models[name]) for name in MODELS]
    config = emulated_config(device_bytes) + _POOL_CONFIG.format(
        cache_bytes=int(sum(sizes) + 1.6 * max(sizes)), max_requests=MAX_REQUEST_ROWS
    )
    folder = tmp_path_factory.mktemp("pool")
    prepare_state(folder / "state", profiled=LLAMA)
    with private_daemon(config, folder, start=start_daemon) as daemon:
        for name in MODELS:
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        yield daemon


@pytest.fixture
def pool(shared_pool: PrivateDaemon) -> Iterator[PrivateDaemon]:
    """A running daemon with the four tiny models, left as it was found.

    After every test nothing may be live, and the worker's accounts must agree.
    """
    yield shared_pool
    until(lambda: not ps(shared_pool).requests)
    until(lambda: all(row.num_live == 0 for row in ps(shared_pool).models))
    check(shared_pool)
    states = {row.name: row.state for row in ps(shared_pool).models}
    assert states == dict.fromkeys(MODELS, "ready")


@pytest.fixture
async def api(pool: PrivateDaemon) -> AsyncIterator[AsyncOpenAI]:
    """The official OpenAI client of ``pool``."""
    async with api_client(pool.http_url) as client:
        yield client


@pytest.fixture
def http(pool: PrivateDaemon) -> Iterator[httpx.Client]:
    """Plain HTTP to ``pool``, for what the official client would not send."""
    with httpx.Client(base_url=pool.http_url, timeout=30) as client:
        yield client


@pytest.fixture
def copy_checkpoint(tmp_path: Path) -> Callable[[Path], Path]:
    """Makes a copy of a checkpoint that a test may damage."""

    def copy(source: Path) -> Path:
        target = tmp_path / "checkpoint"
        target.mkdir()
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    return copy


# Room for one of the three models and the KV of some requests.
_SIM_CONFIG = """
[[device]]
kind = "sim"
gpu = "H800"
memory = "20GiB"
[[device]]
kind = "sim"
gpu = "A10"

[memory]
model_cache = 0
"""


@pytest.fixture(scope="session")
def sim_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    """A daemon with two simulated GPUs and three models, for all tests of such."""
    folder = tmp_path_factory.mktemp("box")
    with sim_daemon(_SIM_CONFIG, folder, ("one", "two", "three")) as daemon:
        yield daemon
