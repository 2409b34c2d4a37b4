"""When the watchdog is fed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.system.systemd import Notifier, informed
from tests.service_manager import FakeManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    with FakeManager(tmp_path) as running:
        yield running


async def until_sent(manager: FakeManager, field: str, num: int = 1) -> None:
    await asyncio.to_thread(manager.wait_for, field, num)


async def test_a_daemon_that_is_well_says_so_again_and_again(manager: FakeManager) -> None:
    notifier = Notifier(manager.address)
    async with informed(notifier, 0.03, lambda: "two models", lambda _: ""):
        await until_sent(manager, "WATCHDOG", 3)
    assert manager.values("STATUS") == ["two models"]


async def test_one_that_is_not_well_says_why_until_it_is(
    manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    problem = "nobody looks after the workers"
    notifier = Notifier(manager.address)
    async with informed(notifier, 0.03, lambda: "fine", lambda _: problem):
        await until_sent(manager, "STATUS")
        assert manager.values("STATUS") == [f"stuck: {problem}"]
        assert manager.values("WATCHDOG") == []
        problem = ""
        await until_sent(manager, "WATCHDOG")
    assert caplog.text.count("no watchdog ping is sent: nobody") == 1


async def test_without_a_watchdog_there_is_the_status(manager: FakeManager) -> None:
    async with informed(Notifier(manager.address), None, lambda: "fine", lambda _: ""):
        await until_sent(manager, "STATUS")
    assert manager.values("WATCHDOG") == []


async def test_without_a_manager_nobody_is_asked() -> None:
    def ask(*_: float) -> str:
        raise AssertionError("asked")

    async with informed(Notifier(), 0.03, ask, ask):
        await asyncio.sleep(0)
