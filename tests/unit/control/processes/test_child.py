"""Child processes that end, and those that would not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from gpupoold.control.processes import child
from gpupoold.control.processes.child import Child, Launch, Process
from gpupoold.wire import messages as m

TIMEOUT_S = 20


class Stubborn:
    """A process that ends when it has been killed so often."""

    def __init__(self, num_kills: int) -> None:
        self.num_kills = 0
        self._ended = asyncio.Event()
        self._num_wanted = num_kills

    @property
    def pid(self) -> int:
        return 1

    async def wait(self) -> int:
        await self._ended.wait()
        return -signal.SIGKILL

    def kill(self) -> None:
        self.num_kills += 1
        if self.num_kills == self._num_wanted:
            self._ended.set()


async def started(process: Process, folder: Path) -> Child[Any]:
    async def start(_: Launch) -> Process:
        return process

    log = folder / "child.log"
    return await Child.start("a child", "module", [], m.FromWorker, log, starter=start)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_LEAVING_S", 0.05)
    monkeypatch.setattr(child, "_DYING_S", 0.05)


async def test_one_that_hung_up_and_stays_is_killed(tmp_path: Path) -> None:
    process = Stubborn(1)
    ended = (await started(process, tmp_path)).ended()
    assert await asyncio.wait_for(ended, TIMEOUT_S) == -signal.SIGKILL
    assert process.num_kills == 1


async def test_one_that_cannot_be_killed_is_given_up(tmp_path: Path) -> None:
    process = Stubborn(100)
    ended = (await started(process, tmp_path)).ended()
    assert await asyncio.wait_for(ended, TIMEOUT_S) is None


async def test_stopping_gives_it_up_too(tmp_path: Path) -> None:
    process = Stubborn(100)
    stubborn = await started(process, tmp_path)
    await asyncio.wait_for(stubborn.stop(m.Shutdown(), 0.05), TIMEOUT_S)
    assert process.num_kills >= 1
    assert stubborn.channel.closed
