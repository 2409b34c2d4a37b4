"""When the watchdog is fed, and what a reload says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.service_manager import Reloads, informed
from gpupoold.systemd import Notifier
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
    assert caplog.text.count("the watchdog is not fed: nobody") == 1


async def test_without_a_watchdog_there_is_the_status(manager: FakeManager) -> None:
    async with informed(Notifier(manager.address), None, lambda: "fine", lambda _: ""):
        await until_sent(manager, "STATUS")


async def test_without_a_manager_nobody_is_asked() -> None:
    def ask(*_: float) -> str:
        raise AssertionError("asked")

    async with informed(Notifier(), 0.03, ask, ask):
        await asyncio.sleep(0)


async def test_reloads_come_one_after_the_other(manager: FakeManager) -> None:
    running, runs = 0, 0
    may_end = asyncio.Event()

    async def reload() -> None:
        nonlocal running, runs
        running, runs = running + 1, runs + 1
        assert running == 1
        await may_end.wait()
        running -= 1

    reloads = Reloads(Notifier(manager.address), reload)
    reloads.ask()
    await until_sent(manager, "RELOADING")
    for _ in range(3):
        reloads.ask()
    may_end.set()
    await reloads.stop()
    assert runs == 2  # the second has seen whatever came meanwhile
    await until_sent(manager, "READY", 2)


async def test_a_reload_that_fails_ends_all_the_same(
    manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    async def reload() -> None:
        raise ValueError("on purpose")

    reloads = Reloads(Notifier(manager.address), reload)
    reloads.ask()
    await reloads.stop()
    await until_sent(manager, "READY")
    assert "the reload failed, nothing was changed: on purpose" in caplog.text
