"""A supervised process: the configuration, the set-up, ends and restarts, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from gpupoold.config.schema import RunningSettings, Settings
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.supervised import Death, Supervised, Timing, Watch
from gpupoold.wire import messages as m

TIMEOUT_S = 20
# Reports readiness, then the size limit of each configuration; leaves with a message when asked to.
SAMPLE = """
import socket, sys
from gpupoold.wire import messages as m
from gpupoold.wire.channel import BlockingChannel

sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--wire-fd") + 1]))
channel = BlockingChannel(sock, m.ToFrontend)
channel.send(m.FrontendReady(0))
while True:
    match channel.receive(None):
        case m.Reconfigure() as message:
            channel.send(m.CallResult(message.max_body_bytes))
        case m.Shutdown():
            channel.send(m.CallResult(-1))
            break
"""


class Sample(Supervised[m.FromFrontend]):
    """Runs the sample; restarts at once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = RunningSettings.of(settings)
        self.now_s = 0.0
        self.waits_s: list[float] = []
        super().__init__("sample 0", self.settings, Timing(lambda: self.now_s, self._wait))
        self.on_launched: Callable[[], None] = lambda: None
        self.sizes: list[int] = []
        self.deaths: list[Death] = []
        self.forgotten: list[str] = []
        self.num_up = 0
        self.setting_up: list[Coroutine[None, None, None]] = []

    async def _launch(self) -> Child[m.FromFrontend]:
        child: Child[m.FromFrontend] = await Child.start(
            self.name, "supervised_sample", [], m.FromFrontend, self.log_path
        )
        self.on_launched()
        return child

    def _note(self, message: m.FromFrontend, watch: Watch, now_s: float) -> None:
        assert now_s == self.now_s
        match message:
            case m.FrontendReady():
                self._begin_set_up()
            case m.CallResult():
                self.sizes.append(message.call_id)

    async def _set_up(self) -> None:
        self.num_up += 1
        if self.setting_up:
            await self.setting_up.pop()

    async def _note_end(self, death: Death) -> bool:
        self.deaths.append(death)
        return False

    def _forget(self, reason: str) -> None:
        super()._forget(reason)
        self.forgotten.append(reason)

    async def _wait(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sample]:
    (tmp_path / "supervised_sample.py").write_text(SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    paths: dict[str, object] = {"model_dirs": []}
    for name in ("state", "runtime", "log", "download"):
        paths[f"{name}_dir"] = tmp_path / name
    settings = Settings.model_validate({"paths": paths, "device": [{"kind": "emulated"}]})
    settings.paths.log_dir.mkdir()
    made = Sample(settings)
    yield made
    await made.stop()


async def test_configuration_that_changes_during_the_start_is_sent(sample: Sample) -> None:
    def change() -> None:
        server = sample.settings.server.model_copy(update={"max_body_bytes": 123456})
        sample.settings.take(sample.settings.model_copy(update={"server": server}))

    sample.on_launched = change
    sample.start()
    await sample.until(lambda: sample.sizes == [123456])
    sample.on_launched = lambda: None
    sample.reconfigure()
    await sample.until(lambda: sample.sizes == [123456, 123456])


async def test_ends_are_reported_and_followed_by_restarts(sample: Sample) -> None:
    async def fail_late() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await sample.until(lambda: sample.num_up == 2)
        has_failed.set()
        raise ValueError("not of the present process")

    has_failed = asyncio.Event()
    sample.setting_up = [fail_late()]
    sample.start()
    await sample.until(lambda: sample.num_up == 1)
    assert sample.pid is not None
    os.kill(sample.pid, signal.SIGTERM)
    # The set-up of the first process fails late, and does not end the second.
    await asyncio.wait_for(has_failed.wait(), TIMEOUT_S)
    await sample.until(lambda: len(sample._tasks) == 1)
    sample.end("on purpose")
    sample.end("only the first reason counts")
    await sample.until(lambda: sample.num_up == 3)
    assert sample.deaths == [Death("signal 15", False), Death("on purpose", True)]
    assert sample.waits_s == [0.0, 1.0]
    assert sample.num_restarts == 2
    reasons = ["sample 0 ended (signal 15)", "sample 0 ended (on purpose)"]
    assert sample.forgotten == reasons
    pid = sample.pid
    await sample.stop()
    assert sample.forgotten == reasons
    assert len(sample.deaths) == 2
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("handles", [True, False])
async def test_last_messages_are_handled_if_told_to(sample: Sample, handles: bool) -> None:
    sample.handles_last_messages = handles
    sample.start()
    await sample.until(lambda: bool(sample.sizes))
    await sample.stop()
    assert (sample.sizes[-1] == -1) == handles


async def test_set_up_that_fails_ends_the_process(sample: Sample) -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    sample.setting_up = [fail()]
    sample.start()
    await sample.until(lambda: bool(sample.deaths))
    assert sample.deaths[0] == Death("set-up failed: on purpose", True)
