"""A daemon under a service manager: its sockets, its watchdog, and snapshots that outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.api.client import AdminClient
from gpupoold.errors import GpupoolError
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    QWEN2,
    Answer,
    all_gone,
    api_client,
    ask,
    check,
    child_env,
    emulated_config,
    until,
)
from tests.functional.test_daemon_restart import spoil
from tests.service_manager import FakeManager

pytestmark = pytest.mark.slow

PROMPT = "What is left when a daemon dies?"
# Of a daemon that imports vLLM itself, on a busy machine too.
START_S = 240
PATHS = """
[paths]
state_dir = "{folder}/state"
runtime_dir = "{folder}/run"
model_dirs = []
"""


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[dict[str, socket.socket]]:
    """The sockets that units describe, open as long as the manager runs."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.socket(socket.AF_UNIX) as admin:
        admin.bind(str(folder / "admin.sock"))
        admin.listen()
        yield {"http": http, "admin": admin}


@contextlib.contextmanager
def started(
    manager: FakeManager, folder: Path, sockets: dict[str, socket.socket]
) -> Iterator[PrivateDaemon]:
    log = folder / "daemon.log"
    arguments = ["-m", "gpupoold", "--config", str(folder / "gpupool.toml")]
    environment = child_env() | {"WATCHDOG_USEC": "30000000"}
    process = manager.start(arguments, sockets, environment, log)
    port = sockets["http"].getsockname()[1]
    try:
        yield PrivateDaemon(process, folder / "admin.sock", f"http://127.0.0.1:{port}", log)
    finally:
        process.kill()
        process.wait()


def is_answering(daemon: PrivateDaemon) -> bool:
    with contextlib.suppress(GpupoolError), AdminClient(daemon.socket_path) as client:
        return client.status().state == "ready"
    return False


async def answer(daemon: PrivateDaemon, model: str) -> Answer:
    async with api_client(daemon.http_url) as api:
        return await ask(api, model, PROMPT)


async def test_snapshots_and_sockets_outlive_a_daemon_that_is_killed(
    tiny_models: dict[str, Path], device_bytes: int, tmp_path: Path
) -> None:
    checkpoint = tmp_path / LLAMA
    shutil.copytree(tiny_models[LLAMA], checkpoint)
    config = emulated_config(device_bytes) + PATHS.format(folder=tmp_path)
    (tmp_path / "gpupool.toml").write_text(config)
    with FakeManager(tmp_path) as manager, listening(tmp_path) as sockets:
        with started(manager, tmp_path, sockets) as first:
            until(lambda: is_answering(first), START_S)
            first.add_model(LLAMA, checkpoint, **LOAD_OPTIONS)
            first.add_model(QWEN2, tiny_models[QWEN2], **LOAD_OPTIONS)
            expected = {name: await answer(first, name) for name in (LLAMA, QWEN2)}
            assert len(manager.stored) == 2
            with first.client() as client:
                client.drop_snapshot(QWEN2)
            manager.wait_for("FDSTOREREMOVE")
            [kept] = manager.stored
            assert manager.values("READY") == ["1"]
            assert manager.values("WATCHDOG")

            processes = descendants(first)
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            assert all_gone(processes, 20)
        spoil(checkpoint)  # nobody is to read it

        with started(manager, tmp_path, sockets) as second:
            # Nobody accepts yet, and nobody is refused: requests wait for their model.
            waited = await asyncio.gather(*(answer(second, name) for name in expected))
            assert waited == list(expected.values())
            until(lambda: is_answering(second), START_S)
            assert kept in manager.stored
            assert {name: await answer(second, name) for name in expected} == expected
            assert f"{LLAMA}: the snapshot of" in second.log_path.read_text()
            check(second)
            second.process.terminate()
            assert second.process.wait(60) == 0
        assert manager.values("STOPPING") == ["1"]
        assert kept in manager.stored  # for the next one
    assert (tmp_path / "admin.sock").exists()
