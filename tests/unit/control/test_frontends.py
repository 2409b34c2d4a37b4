"""Several frontends: who accepts, who mounts, who is started again and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpupoold.config.schema import Settings
from gpupoold.config.sections import BatchSettings, LimitSettings, ServerSettings, TracesSettings
from gpupoold.control import frontends as frontend_module
from gpupoold.control.frontends import Frontend, Frontends, NotMounted
from gpupoold.control.processes.child import ForkServer, Launch
from gpupoold.control.processes.supervised import Death, ProcessHandlers, Timing
from gpupoold.errors import GpupoolError
from gpupoold.wire import messages as m
from gpupoold.wire.channel import AsyncChannel, ChannelClosed
from tests.unit.wire.samples import LOADED, MODEL

WAIT_S = 20.0
_pids = itertools.count(4711)


class FakeProcess:
    """A frontend's end of the channel; answers as ``mounts`` says, until it is killed."""

    def __init__(
        self, launch: Launch, mounts: Callable[[FakeProcess], m.CallResult | None]
    ) -> None:
        self.pid = next(_pids)
        options = launch.arguments
        self.number = json.loads(options[options.index("--settings") + 1])["number"]
        self._mounts = mounts
        wire = socket.socket(fileno=os.dup(launch.fd_options["--wire-fd"]))
        self.channel: AsyncChannel[Any] = AsyncChannel(wire, m.ToFrontend)
        self.received: list[m.Message] = []
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        self.channel.send(m.FrontendReady(self.pid))

    async def _run(self) -> None:
        while True:
            try:
                message = await self.channel.receive()
            except ChannelClosed:
                return self.die(0)
            self.received.append(message)
            if isinstance(message, m.Accept):
                self.channel.send(m.Accepting())
            elif isinstance(message, m.Shutdown):
                return self.die(0)
            elif isinstance(message, m.ServeModel):
                answer = self._mounts(self)
                if answer is not None:
                    self.channel.send(m.CallResult(message.call_id, None, *answer_of(answer)))

    def has(self, kind: type[m.Message]) -> bool:
        return any(isinstance(one, kind) for one in self.received)

    def die(self, status: int) -> None:
        """End with this status."""
        if not self._status.done():
            self._status.set_result(status)
            self.channel.close()

    def kill(self) -> None:
        self.die(-9)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)


def answer_of(answer: m.CallResult) -> tuple[str, str, str]:
    return answer.error_code, answer.error_message, answer.error_hint


MOUNTED = m.CallResult(0)
BROKEN = m.CallResult(0, error_code="failed", error_message="no such parser")


class Box:
    """Two frontends whose processes are the test's."""

    def __init__(self, folder: Path) -> None:
        server = ServerSettings(frontends=2)
        settings = SimpleNamespace(
            server=server,
            log=SimpleNamespace(level="info"),
            memory=SimpleNamespace(self_check_interval=0),
            traces=TracesSettings(),
            limits=LimitSettings(),
            batches=BatchSettings(),
            paths=SimpleNamespace(log_dir=folder, state_dir=folder),
        )
        self.processes: dict[int, FakeProcess] = {}
        self.num_started = [0, 0]
        self.down: list[tuple[int, Death]] = []
        self.heard: list[tuple[int, m.FromFrontend]] = []
        self.may_mount = {0: asyncio.Event(), 1: asyncio.Event()}
        self.answers: dict[int, m.CallResult | None] = {0: MOUNTED, 1: MOUNTED}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.frontends = Frontends(
            cast(Settings, settings),
            cast(ForkServer, SimpleNamespace(fork=self._fork)),
            self.listener,
            Timing(sleep=self._sleep),
        )
        self.waits_s: list[float] = []
        self.sleeps_at_once = False
        self.handlers = ProcessHandlers(self._hear, self._set_up, self._note_end)

    async def _fork(self, launch: Launch) -> FakeProcess:
        process = FakeProcess(launch, lambda one: self.answers[one.number])
        self.num_started[process.number] += 1
        self.processes[process.number] = process
        return process

    async def _sleep(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await asyncio.sleep(0.0 if self.sleeps_at_once else wait_s)

    def _hear(self, one: Frontend, message: m.FromFrontend) -> None:
        self.heard.append((one.number, message))

    async def _note_end(self, one: Frontend, death: Death) -> None:
        self.down.append((one.number, death))

    async def _set_up(self, one: Frontend) -> None:
        await self.may_mount[one.number].wait()

    def one(self, number: int) -> Frontend:
        return list(self.frontends)[number]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def both_ready(self) -> None:
        for event in self.may_mount.values():
            event.set()
        await self.until(lambda: all(one.is_ready for one in self.frontends))

    async def is_up_again(self, number: int, num_started: int) -> None:
        await self.until(lambda: self.num_started[number] == num_started and self.one(number).is_up)

    async def is_back(self, number: int, num_started: int) -> None:
        await self.until(
            lambda: self.num_started[number] == num_started and self.one(number).is_ready
        )


async def metrics_text() -> bytes:
    return b"up 1\n"


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    box = Box(tmp_path)
    box.frontends.start(box.handlers, metrics_text)
    await box.until(lambda: all(one.is_up for one in box.frontends))
    yield box
    await box.frontends.stop()
    box.listener.close()


async def test_first_accepts_at_once_the_other_when_all_is_mounted(box: Box) -> None:
    await box.until(lambda: box.frontends.any_ready)
    [first] = [one for one in box.frontends if one.accepts]
    other = box.one(1 - first.number)
    await asyncio.sleep(0.05)
    assert not box.processes[other.number].has(m.Accept)
    box.may_mount[other.number].set()
    await box.until(lambda: other.is_ready)


async def test_one_that_mounts_accepts_as_soon_as_it_is_the_only_one(box: Box) -> None:
    await box.both_ready()
    for event in box.may_mount.values():
        event.clear()
    box.processes[0].die(-11)
    await box.until(lambda: box.num_started[0] == 2 and box.one(0).is_up)
    await asyncio.sleep(0.05)
    assert not box.one(0).accepts
    box.processes[1].die(-11)
    await box.until(lambda: box.one(0).is_ready)


async def test_one_that_was_set_up_is_started_at_once_however_often_it_ends(box: Box) -> None:
    await box.both_ready()
    started_s = asyncio.get_running_loop().time()
    for number in range(20):
        box.processes[0].die(-11)
        await box.is_back(0, number + 2)
    assert asyncio.get_running_loop().time() - started_s < WAIT_S
    assert box.one(0).num_restarts == 20
    assert (box.one(1).num_restarts, box.num_started[1]) == (0, 1)
    assert [(number, death.reason) for number, death in box.down] == [(0, "signal 11")] * 20


async def test_one_that_ends_before_it_is_set_up_waits_a_little(box: Box) -> None:
    await box.both_ready()
    box.may_mount[0].clear()
    box.processes[0].die(-11)
    await box.until(lambda: box.num_started[0] == 2 and box.one(0).is_up)
    box.waits_s.clear()
    box.sleeps_at_once = True
    for number in range(5):
        box.processes[0].die(1)
        await box.is_up_again(0, number + 3)
    assert box.waits_s == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert max(box.waits_s) <= frontend_module._MAX_BACKOFF_S


async def test_model_is_mounted_on_all(box: Box) -> None:
    await box.both_ready()
    await box.frontends.serve(MODEL, LOADED)
    assert all(one.has(m.ServeModel) for one in box.processes.values())


async def test_model_that_no_frontend_can_mount_is_refused(box: Box) -> None:
    await box.both_ready()
    box.answers = {0: BROKEN, 1: BROKEN}
    with pytest.raises(GpupoolError, match="no such parser"):
        await box.frontends.serve(MODEL, LOADED)
    assert box.down == []


async def test_frontend_that_cannot_mount_what_another_can_is_replaced(box: Box) -> None:
    await box.both_ready()
    box.answers[1] = BROKEN
    await box.frontends.serve(MODEL, LOADED)
    await box.is_back(1, 2)
    [(number, death)] = box.down
    assert (number, "no such parser" in death.reason) == (1, True)


async def test_frontend_that_dies_while_it_mounts_holds_nobody_up(box: Box) -> None:
    await box.both_ready()
    box.answers[1] = None
    serving = asyncio.create_task(box.frontends.serve(MODEL, LOADED))
    await box.until(lambda: box.processes[1].has(m.ServeModel))
    assert not serving.done()
    box.processes[1].die(-9)
    await asyncio.wait_for(serving, WAIT_S)


async def test_frontends_that_do_not_mount_in_time_are_replaced_one_after_another(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a template without an end: each could mount no other model."""
    await box.both_ready()
    monkeypatch.setattr(frontend_module, "_SERVE_TIMEOUT_S", 0.05)
    box.answers = {0: None, 1: None}
    with pytest.raises(NotMounted, match="did not mount the API within"):
        await box.frontends.serve(MODEL, LOADED)
    box.answers = {0: MOUNTED, 1: MOUNTED}
    readies: list[int] = []

    def are_replaced() -> bool:
        readies.append(sum(one.is_ready for one in box.frontends))
        return min(box.num_started) == 2 and readies[-1] == 2

    await box.until(are_replaced)
    assert min(readies) == 1, "both were down at once"
    await box.frontends.serve(MODEL, LOADED)


async def test_the_limit_holds_without_the_caller(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.both_ready()
    monkeypatch.setattr(frontend_module, "_SERVE_TIMEOUT_S", 0.05)
    box.answers[1] = None
    serving = asyncio.create_task(box.frontends.serve(MODEL, LOADED))
    await box.until(lambda: box.processes[1].has(m.ServeModel))
    serving.cancel()
    box.answers[1] = MOUNTED
    await box.is_back(1, 2)
    assert box.num_started[0] == 1


async def test_requests_are_marked_with_the_frontend_that_they_come_from(box: Box) -> None:
    await box.both_ready()
    for number in (1, 0):
        add = m.AddRequest("m", f"r{number}", 0.0, 1, 1, [], frontend=7)
        box.processes[number].channel.send(add)
    await box.until(lambda: len(box.heard) == 2)
    told = [(number, cast(m.AddRequest, message).frontend) for number, message in box.heard]
    assert sorted(told) == [(0, 0), (1, 1)]


async def test_messages_for_one_and_for_all(box: Box) -> None:
    await box.both_ready()
    box.frontends.send_to(1, m.StopServing("one"))
    box.frontends.send(m.StopServing("all"))
    everybody = box.processes.values()
    await box.until(lambda: all(m.StopServing("all") in one.received for one in everybody))
    assert m.StopServing("one") in box.processes[1].received
    assert m.StopServing("one") not in box.processes[0].received


async def test_metrics_go_to_whom_asked(box: Box) -> None:
    await box.both_ready()
    box.processes[1].channel.send(m.AskMetrics(5))
    await box.until(lambda: m.MetricsText(5, b"up 1\n") in box.processes[1].received)
    assert not box.processes[0].has(m.MetricsText)


async def test_model_is_not_taken_for_mounted_when_the_daemon_stops(box: Box) -> None:
    await box.both_ready()
    box.answers = {0: None, 1: None}
    serving = asyncio.create_task(box.frontends.serve(MODEL, LOADED))
    await box.until(lambda: all(one.has(m.ServeModel) for one in box.processes.values()))
    await box.frontends.stop()
    for _ in range(10):
        await asyncio.sleep(0)
    assert serving.cancelled()
    serving.cancel()
