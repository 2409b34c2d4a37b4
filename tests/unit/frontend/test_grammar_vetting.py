"""Verdicts: cached, shared, and asked of the checker in turns; with a checker that is ours."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator

import pytest

from gpupoold.domain import ModelName
from gpupoold.frontend import grammars
from gpupoold.frontend.grammars import (
    GrammarCheck,
    GrammarVerdict,
    GrammarVetting,
    RunningChecker,
    TooManyGrammars,
)
from gpupoold.wire.channel import AsyncChannel
from gpupoold.wire.messages import LoadedModel, ModelToLoad

MODEL = ModelToLoad(name=ModelName("m"), source="a", path="/m")
LOADED = LoadedModel(
    name="m",
    architecture="A",
    max_model_len=8,
    dtype="float32",
    block_size=16,
    num_gpu_blocks=1,
    weight_bytes=0,
    kv_bytes_per_token=0,
    supported_tasks=("generate",),
)


class Checker:
    """The other end of the channel, which answers when told to."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(["sleep", "600"])
        running = RunningChecker(theirs, self.process.pid, is_forked=False)
        self.vetting = GrammarVetting("warning", running)
        self.channel: AsyncChannel[GrammarCheck] = AsyncChannel(ours, GrammarCheck)

    def ask(
        self, constraint: bytes, caller: str = "", mount_id: int = 1
    ) -> asyncio.Task[GrammarVerdict]:
        asking = self.vetting.verdict(mount_id, MODEL, LOADED, constraint, caller)
        return asyncio.ensure_future(asking)

    async def asked(self) -> GrammarCheck:
        return await asyncio.wait_for(self.channel.receive(), 10)

    async def nothing_is_asked(self) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(self.channel.receive(), 0.05)

    def answer(self, check: GrammarCheck, outcome: str = "accepted") -> None:
        self.channel.send(GrammarVerdict(check.check_id, outcome, "xgrammar", "why"))  # type: ignore[arg-type]


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    running = Checker()
    yield running
    running.channel.close()
    running.process.kill()
    running.process.wait()


@pytest.mark.parametrize("outcome", ["accepted", "refused"])
async def test_verdict_is_kept(checker: Checker, outcome: str) -> None:
    first = checker.ask(b"{}")
    checker.answer(await checker.asked(), outcome)
    assert (await first).outcome == outcome
    assert (await checker.ask(b"{}")).outcome == outcome
    await checker.nothing_is_asked()


async def test_other_mount_is_asked_anew(checker: Checker) -> None:
    checker.ask(b"{}")
    checker.answer(await checker.asked())
    checker.ask(b"{}", mount_id=2)
    assert (await checker.asked()).mount_id == 2


async def test_unknown_is_not_kept(checker: Checker) -> None:
    first = checker.ask(b"{}")
    checker.answer(await checker.asked(), "unknown")
    assert (await first).outcome == "unknown"
    checker.ask(b"{}")
    await checker.asked()


async def test_equal_grammars_share_a_check(checker: Checker) -> None:
    several = [checker.ask(b"{}") for _ in range(5)]
    check = await checker.asked()
    several.pop().cancel()  # its client left; the others still want to know
    await checker.nothing_is_asked()
    checker.answer(check)
    assert {one.outcome for one in await asyncio.gather(*several)} == {"accepted"}


async def test_oldest_verdicts_go(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)

    async def is_new(constraint: bytes) -> bool:
        asked = checker.ask(constraint)
        await asyncio.sleep(0)
        if asked.done():
            return False
        checker.answer(await checker.asked())
        await asked
        return True

    assert [await is_new(one) for one in (b"1", b"2", b"1", b"3")] == [True, True, False, True]
    assert not await is_new(b"1")  # used after the second
    assert await is_new(b"2")


async def test_callers_take_turns(checker: Checker) -> None:
    for number in range(6):
        checker.ask(b"flood %d" % number, "a")
    running = [await checker.asked() for _ in range(grammars.MAX_RUNNING)]
    await checker.nothing_is_asked()
    checker.ask(b"one", "b")
    await asyncio.sleep(0)
    asked = []
    for _ in range(2):
        checker.answer(running.pop(0))
        running.append(await checker.asked())
        asked.append(running[-1].constraint)
    assert b"one" in asked


async def test_flood_is_refused_to_who_sends_it(checker: Checker) -> None:
    number = grammars.MAX_RUNNING + grammars.MAX_WAITING_PER_CALLER
    several = [checker.ask(b"flood %d" % one, "a") for one in range(number)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyGrammars):
        await checker.ask(b"one more", "a")
    other = checker.ask(b"other", "b")
    for _ in range(number + 1):
        checker.answer(await checker.asked())
    assert (await other).outcome == "accepted"
    await asyncio.gather(*several)


async def test_all_callers_together_are_bounded(checker: Checker) -> None:
    number = grammars.MAX_RUNNING + grammars.MAX_WAITING
    several = [checker.ask(b"%d" % one, f"caller {one}") for one in range(number)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyGrammars):
        await checker.ask(b"one more", "another")
    for one in several:
        one.cancel()


async def test_death_of_the_checker_is_an_answer(checker: Checker) -> None:
    asked = checker.ask(b"{}")
    await checker.asked()
    checker.channel.close()
    assert (await asked).outcome == "unknown"


async def test_hung_checker_is_killed(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting checks are answered, and the next one starts another checker."""
    first = checker.ask(b"1")
    checker.answer(await checker.asked())
    await first
    monkeypatch.setattr(grammars, "ANSWER_TIMEOUT_S", 0.01)
    started: list[int] = []

    async def start() -> RunningChecker:
        started.append(1)
        ours, theirs = socket.socketpair()
        theirs.close()
        return RunningChecker(ours, checker.process.pid, is_forked=False)

    monkeypatch.setattr(checker.vetting, "_start", start)
    several = [checker.ask(b"%d" % number, f"caller {number}") for number in range(2, 6)]
    found = await asyncio.wait_for(asyncio.gather(*several), 30)
    assert {one.outcome for one in found} == {"unknown"}
    assert "has not answered within" in found[0].reason
    assert await asyncio.to_thread(checker.process.wait, 30) == -signal.SIGKILL
    checker.channel.close()  # as the kernel does for a real checker
    while not started:
        await checker.ask(b"7")


async def test_new_checker_has_time_to_start(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "ANSWER_TIMEOUT_S", 0.01)
    assert (await checker.ask(b"1")).outcome == "unknown"
    assert checker.process.poll() is None
    check = await checker.asked()
    checker.answer(check)  # too late, and harmless
    monkeypatch.setattr(grammars, "ANSWER_TIMEOUT_S", 60)
    again = checker.ask(b"1")
    checker.answer(await checker.asked())
    assert (await again).outcome == "accepted"


def test_conviction_holds_for_the_key_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    known = GrammarVetting("warning")
    assert not known.has_convictions
    for number in range(3):
        known.convict("m", "key", f"g{number}", f"why {number}")
    assert known.has_convictions
    found = [known.conviction("m", "key", f"g{number}") for number in range(3)]
    assert found == ["", "why 1", "why 2"]
    assert known.conviction("m", "other", "g2") == known.conviction("n", "key", "g2") == ""
