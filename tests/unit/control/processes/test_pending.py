"""Answers that are owed: come, come not, or come when nobody waits."""

from __future__ import annotations

import asyncio

import pytest

from gpupoold.control.processes.child import Calls, Pending
from gpupoold.errors import Failed
from gpupoold.wire import messages as m


async def test_answers_go_to_those_that_wait() -> None:
    pending: Pending[str, int] = Pending()
    first, second = pending.expect("a"), pending.expect("b")
    assert "a" in pending
    pending.resolve("a", 1)
    pending.resolve("a", 2)
    pending.reject("a", Failed("too late"))
    pending.resolve("unknown", 3)
    assert await first == 1
    pending.reject("b", Failed("no"))
    with pytest.raises(Failed, match="no"):
        await second
    pending.forget("a")
    pending.forget("a")
    assert "a" not in pending


async def test_all_at_once() -> None:
    pending: Pending[int, str] = Pending()
    futures = [pending.expect(key) for key in range(3)]
    pending.resolve(1, "came before")
    pending.resolve_all("done")
    assert [await future for future in futures] == ["done", "came before", "done"]
    failing = pending.expect(4)
    pending.reject_all(Failed("the process died"))
    with pytest.raises(Failed, match="died"):
        await failing


@pytest.mark.parametrize("fails", [False, True])
async def test_settled(fails: bool) -> None:
    pending: Pending[str, int] = Pending()
    await pending.settled("nothing is owed")
    future = pending.expect("a")
    waiting = asyncio.create_task(pending.settled("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    if fails:
        pending.reject("a", Failed("no"))
    else:
        pending.resolve("a", 1)
    await waiting
    assert isinstance(future.exception(), Failed if fails else type(None))


async def test_settled_when_nobody_waits_for_it_any_longer() -> None:
    pending: Pending[str, int] = Pending()
    pending.expect("a")
    waiting = asyncio.create_task(pending.settled("a"))
    await asyncio.sleep(0)
    pending.forget("a")
    await asyncio.wait_for(waiting, 20)


def test_the_oldest() -> None:
    async def run() -> list[str | None]:
        pending: Pending[str, int] = Pending()
        seen = [pending.oldest]
        for key in ("b", "a"):
            pending.expect(key)
            seen.append(pending.oldest)
        pending.forget("b")
        return [*seen, pending.oldest]

    assert asyncio.run(run()) == [None, "b", "b", "a"]


async def test_answers_to_numbered_calls_have_a_time_limit() -> None:
    calls: Calls[str] = Calls()
    first, second = calls.next_id(), calls.next_id()
    assert first != second
    answers = [asyncio.create_task(calls.answer(one, 20)) for one in (first, second)]
    await asyncio.sleep(0)
    calls.answered(m.CallResult(second, error_code="failed", error_message="no room"), "unused")
    calls.answered(m.CallResult(first), "done")
    assert await answers[0] == "done"
    with pytest.raises(Failed, match="no room"):
        await answers[1]
    with pytest.raises(TimeoutError):
        await calls.answer(calls.next_id(), 0)
    assert calls.oldest is None
    assert not calls.resolve(first, "too late")
