"""Parked devices: their process is gone, and the next request brings it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.bench.rig import emulated_config
from benchmarks.private_daemon import PrivateDaemon
from benchmarks.processes import descendants
from gpupoold.errors import Refused, UsageError
from tests.functional.daemon_tools import (
    LLAMA,
    LOAD_OPTIONS,
    LONG,
    QWEN2,
    QWEN3,
    api_client,
    ask,
    check_all,
    cli,
    eventually,
    open_stream,
    private_daemon,
    ps,
    until,
    weight_bytes,
)

NUM_DEVICES = 2


@pytest.fixture(scope="module")
def daemon(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateDaemon]:
    """Two devices, with two models each, which no other test changes."""
    num_bytes = int(1.6 * max(map(weight_bytes, tiny_models.values())))
    folder = tmp_path_factory.mktemp("parking")
    with private_daemon(emulated_config(num_bytes) * NUM_DEVICES, folder) as daemon:
        for name in (LLAMA, QWEN2):
            daemon.add_model(name, tiny_models[name], **LOAD_OPTIONS)
        until(lambda: all(one.num_engines == 2 for one in ps(daemon).devices))
        yield daemon


def states(daemon: PrivateDaemon) -> list[str]:
    return [one.state for one in ps(daemon).devices]


def num_workers(daemon: PrivateDaemon) -> int:
    num = 0
    for child in descendants(daemon):
        with contextlib.suppress(psutil.Error):  # it has just ended
            num += "gpupoold.worker --device" in " ".join(child.cmdline())
    return num


def park(daemon: PrivateDaemon, *numbers: int) -> None:
    """Park devices, each when its loads are over."""

    def is_parked(number: int) -> bool:
        with daemon.client() as client:
            try:
                client.park(number)
            except Refused:
                return False
            return True

    for number in numbers:
        until(lambda number=number: is_parked(number), 30)  # type: ignore[misc]
    rows = {row.device: row for row in ps(daemon).devices}
    assert all((rows[number].state, rows[number].pid) == ("parked", None) for number in numbers)
    assert all(rows[number].num_engines == 0 for number in numbers)


def wake_all(daemon: PrivateDaemon) -> None:
    with daemon.client() as client:
        for number in range(NUM_DEVICES):
            client.wake(number)
    until(lambda: states(daemon) == ["ready"] * NUM_DEVICES, 60)
    check_all(daemon)


async def test_the_next_request_wakes_a_device(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        expected = await ask(api, LLAMA, "asleep?", 12)
        park(daemon, 0, 1)
        await eventually(lambda: num_workers(daemon) == 0)
        assert httpx.get(f"{daemon.http_url}/ready").status_code == 200
        assert {one.state for one in ps(daemon).models} == {"ready"}
        first, second = await asyncio.gather(
            ask(api, LLAMA, "asleep?", 12), ask(api, QWEN2, "you too?", 12)
        )
        assert first.token_ids == expected.token_ids
        assert len(second.token_ids) == 12
        assert sorted(states(daemon)) == ["parked", "ready"]
    with daemon.client() as client:
        kinds = [event.kind for event in client.events(limit=50)]
    assert kinds.count("device_parked") == 2
    assert kinds.count("device_woken") == 1
    assert "worker_down" not in kinds
    wake_all(daemon)


async def test_a_device_with_requests_stays(daemon: PrivateDaemon) -> None:
    async with api_client(daemon.http_url) as api:
        stream = await open_stream(api, LLAMA, "busy", LONG)
        await anext(aiter(stream))
        with daemon.client() as client, pytest.raises(Refused, match="has requests"):
            client.park(0)
        await stream.close()
    with daemon.client() as client, pytest.raises(UsageError):
        client.park(NUM_DEVICES)
    assert cli(daemon, "park", "7").returncode == 2


@pytest.mark.slow
async def test_other_devices_go_on(daemon: PrivateDaemon) -> None:
    park(daemon, 1)
    async with api_client(daemon.http_url) as api:
        assert len((await ask(api, QWEN2, "device 0", 8)).token_ids) == 8
    assert states(daemon) == ["ready", "parked"]
    wake_all(daemon)


@pytest.mark.slow
async def test_a_model_is_added_while_all_devices_are_parked(
    daemon: PrivateDaemon, tiny_models: dict[str, Path]
) -> None:
    park(daemon, 0, 1)
    daemon.add_model(QWEN3, tiny_models[QWEN3], **LOAD_OPTIONS)
    async with api_client(daemon.http_url) as api:
        assert len((await ask(api, QWEN3, "new here", 8)).token_ids) == 8
    with daemon.client() as client:
        client.remove_model(QWEN3, "force")
    wake_all(daemon)


@pytest.mark.slow
async def test_idle_devices_are_parked(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config = emulated_config(2 * weight_bytes(tiny_models[LLAMA])) + '\n[idle]\npark_after = "2s"\n'
    with private_daemon(config, tmp_path) as daemon:
        daemon.add_model(LLAMA, tiny_models[LLAMA], **LOAD_OPTIONS)
        async with api_client(daemon.http_url) as api:
            for _ in range(2):
                await eventually(lambda: states(daemon) == ["parked"], 30)
                assert len((await ask(api, LLAMA, "hello", 4)).token_ids) == 4
                assert states(daemon) == ["ready"]
