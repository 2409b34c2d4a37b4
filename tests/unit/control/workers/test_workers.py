"""The supervisor of workers, with processes that are played by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpupoold.config.schema import Settings
from gpupoold.control.fleet.states import HostEvent, Hosts
from gpupoold.control.processes.child import ForkServer, Launch
from gpupoold.control.processes.supervised import Death, ProcessHandlers
from gpupoold.control.workers.worker import Worker, WorkerProcess
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import DeviceFacts, ModelName
from gpupoold.errors import Failed, TimedOut, Unavailable
from gpupoold.system.activity import Activity, ActivityPage, ThreadPhase
from gpupoold.system.nvml import Reading
from gpupoold.system.process import OUT_OF_DEVICE_MEMORY_STATUS
from gpupoold.wire import messages as m
from gpupoold.wire.channel import AsyncChannel

TIMEOUT_S = 20
MODEL = m.ModelToLoad(name=ModelName("llama"), source="a", path="/models/llama")


class Played:
    """A process that says what the test wants it to."""

    pid = 4711

    def __init__(self, launch: Launch) -> None:
        self.arguments = launch.arguments
        fd = launch.fd_options["--wire-fd"]
        self.channel: AsyncChannel[Any] = AsyncChannel(
            socket.socket(fileno=socket.dup(fd)), m.ToWorker
        )
        self.activity = ActivityPage()
        self.activity.attach(os.dup(launch.fd_options["--activity-fd"]))
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)
            self.channel.close()

    def come_up(self) -> None:
        self.channel.send(m.WorkerReady(DeviceFacts(10 << 30, 4096, 1e9), "0.32.0"))


class Rig:
    """A supervisor of one worker, the processes it started, and what it told."""

    def __init__(self, settings: Settings) -> None:
        self.played: list[Played] = []
        self.downs: list[Death] = []
        self.on_up: Callable[[], None] = lambda: None
        forks = ForkServer(settings, {}, ())
        self.hosts = Hosts()
        self.supervisor = WorkerSupervisor(settings, forks, self.hosts, self.start)
        self.handlers = ProcessHandlers(self._on_message, self._on_up, self._on_down)
        [self.device] = self.supervisor.workers

    @property
    def process(self) -> WorkerProcess:
        [process] = self.supervisor.processes
        return process

    async def start(self, launch: Launch) -> Played:
        self.played.append(Played(launch))
        return self.played[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def runs(self, number: int) -> Played:
        """The process of this number, when it is ready."""
        await self.until(lambda: len(self.played) > number)
        self.played[number].come_up()
        await self.until(lambda: self.device.is_ready)
        return self.played[number]

    async def dies(self, count: int) -> Death:
        await self.until(lambda: len(self.downs) >= count)
        return self.downs[count - 1]

    def _on_message(self, worker: Worker, message: m.FromWorker) -> None:
        raise AssertionError(f"{message} cannot be handled")

    async def _on_up(self, worker: Worker) -> None:
        self.on_up()

    async def _on_down(self, worker: Worker, death: Death) -> None:
        self.downs.append(death)


@pytest.fixture
def device() -> dict[str, object]:
    return {"kind": "sim", "gpu": "H800"}


@pytest.fixture
async def rig(tmp_path: Path, device: dict[str, object]) -> AsyncIterator[Rig]:
    paths: dict[str, object] = {"model_dirs": []}
    for name in ("state", "runtime", "log", "download"):
        paths[f"{name}_dir"] = tmp_path / name
    limits = {"load_timeout": 0.2, "stop_grace": 0.05}
    settings = Settings.model_validate(
        {"paths": paths, "device": [device], "limits": limits, "memory": {"kv_host": "1GiB"}}
    )
    settings.paths.log_dir.mkdir()
    made = Rig(settings)
    made.supervisor.start(made.handlers)
    yield made
    await made.supervisor.stop()


async def test_one_that_somebody_kills_is_back_at_once_again_and_again(rig: Rig) -> None:
    for number in range(6):
        (await rig.runs(number)).end(-signal.SIGKILL)
        assert await rig.dies(number + 1) == Death("signal 9", False)
    await rig.runs(6)


async def test_what_it_did_is_told_with_its_death(rig: Rig) -> None:
    played = await rig.runs(0)
    played.activity.main.set(ThreadPhase.LOAD, "llama")
    loading = asyncio.create_task(rig.supervisor.load(rig.device, MODEL, None))
    await rig.until(lambda: bool(rig.device.loads["llama"]))
    played.end(-signal.SIGSEGV)
    assert await rig.dies(1) == Death("signal 11", True, (Activity(ThreadPhase.LOAD, "llama"),))
    with pytest.raises(Failed, match=r"worker 0 ended \(signal 11\)"):
        await loading


async def test_what_it_did_when_it_was_killed_is_told_too(rig: Rig) -> None:
    (await rig.runs(0)).activity.main.set(ThreadPhase.LOAD, "llama")
    with pytest.raises(TimedOut, match=r"llama: not loaded within 0\.2 s"):
        await rig.supervisor.load(rig.device, MODEL, None)
    rig.process.end("hung")
    rig.process.end("only the first reason counts")
    assert await rig.dies(1) == Death("hung", True, (Activity(ThreadPhase.LOAD, "llama"),))
    played = await rig.runs(1)
    played.end(-signal.SIGTERM)
    assert await rig.dies(2) == Death("signal 15", False)


async def test_a_crash_after_a_fault_of_the_gpu_is_the_devices(rig: Rig) -> None:
    async def fault_of(number: int) -> str:
        return f"GPU {number}: Xid 79"

    rig.supervisor.gpu_readings.fault_of = fault_of  # type: ignore[method-assign]
    (await rig.runs(0)).end(1)
    assert await rig.dies(1) == Death("exit status 1; GPU 0: Xid 79", True, is_of_device=True)
    (await rig.runs(1)).end(-signal.SIGKILL)
    assert await rig.dies(2) == Death("signal 9", False)


@pytest.mark.parametrize("device", [{"kind": "cuda"}])
async def test_after_a_lack_of_device_memory_more_of_the_gpu_stays_free(rig: Rig) -> None:
    rig.process._backoff._max_s = 0.0
    shown = ["512 MiB", "1 GiB", "1.25 GiB"]
    for number, spare in enumerate(shown):
        (await rig.runs(number)).end(OUT_OF_DEVICE_MEMORY_STATUS)
        assert (await rig.dies(number + 1)).reason == (
            f"out of device memory; from now on {spare} stay free beside memory.reserve"
        )
    (await rig.runs(3)).end(OUT_OF_DEVICE_MEMORY_STATUS)
    assert (await rig.dies(4)).reason == "out of device memory"
    assert spare_of(await rig.runs(4)) == 5 << 28


@pytest.mark.parametrize("device", [{"kind": "cuda"}])
async def test_less_stays_free_again_after_hours_without_a_lack(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.process._backoff._max_s = 0.0
    for number in range(2):
        (await rig.runs(number)).end(OUT_OF_DEVICE_MEMORY_STATUS)
    assert spare_of(await rig.runs(2)) == 1 << 30
    clock = rig.process._lacked_at_s
    for number, (hours, spare) in enumerate([(0.9, 1 << 30), (1.1, 1 << 29), (2.1, 0)], 2):
        monkeypatch.setattr(rig.process, "_clock", lambda hours=hours: clock + hours * 3600)
        rig.played[number].end(-signal.SIGKILL)
        assert spare_of(await rig.runs(number + 1)) == spare


@pytest.mark.parametrize("device", [{"kind": "cuda"}])
async def test_more_stays_free_on_a_gpu_with_a_display(rig: Rig) -> None:
    async def first_of(number: int) -> Reading:
        return Reading(has_display=True)

    rig.supervisor.gpu_readings.first_of = first_of  # type: ignore[method-assign]
    (await rig.runs(0)).end(-signal.SIGKILL)
    assert spare_of(await rig.runs(1)) == 1 << 30


def spare_of(played: Played) -> int:
    return int(played.arguments[played.arguments.index("--spare-bytes") + 1])


async def test_calls_have_a_limit(rig: Rig) -> None:
    await rig.runs(0)
    with pytest.raises(TimedOut, match=r"did not answer check_integrity within 0\.2 s"):
        await rig.supervisor.call(rig.device, "check_integrity")
    with pytest.raises(TimedOut, match=r"did not answer bench_kv within 0\.05 s"):
        await rig.supervisor.call(rig.device, "bench_kv", limit_s=0.05)


async def test_a_worker_that_starts_can_be_called_later(rig: Rig) -> None:
    """The answer of the admin API is 503, not 500."""
    with pytest.raises(Unavailable, match="worker 0 is starting"):
        await rig.supervisor.call(rig.device, "check_integrity")


async def test_a_load_behind_an_unload_that_is_given_up(rig: Rig) -> None:
    await rig.runs(0)
    rig.hosts.of("llama", 0).move(HostEvent.LOAD)
    unloading = asyncio.create_task(rig.supervisor.unload(rig.device, "llama"))
    await asyncio.sleep(0)
    with pytest.raises(TimedOut, match="not loaded"):
        await asyncio.wait_for(rig.supervisor.load(rig.device, MODEL, None), TIMEOUT_S)
    with pytest.raises(TimedOut, match="did not unload llama"):
        await unloading


async def test_one_that_says_nonsense_is_replaced(rig: Rig) -> None:
    (await rig.runs(0)).channel.send(m.TurnReport(1, "m", None, 0.0, {}))
    assert await rig.dies(1) == Death("sent an invalid message", True)
    await rig.runs(1)


async def test_one_that_cannot_be_set_up_is_replaced(rig: Rig) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    rig.on_up = fail
    await rig.until(lambda: len(rig.played) == 1)
    rig.played[0].come_up()
    assert await rig.dies(1) == Death("set-up failed: on purpose", True)
    rig.on_up = lambda: None
    await rig.runs(1)
