"""Places: shares, turns, and what a cancelled wait leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from gpupoold.frontend.batches.places import Places


def tried(places: Places, owner: str, group: str = "") -> asyncio.Task[None]:
    return asyncio.create_task(places.take(owner, group))


async def num_taken(places: Places, owner: str, group: str, num: int) -> int:
    """How many of ``num`` places are given at once."""
    tasks = [tried(places, owner, group) for _ in range(num)]
    await asyncio.sleep(0)
    given_now = sum(one.done() for one in tasks)
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)
    return given_now


@pytest.mark.asyncio
async def test_a_newcomer_finds_a_place() -> None:
    places = Places(64)
    assert await num_taken(places, "a", "1", 100) == 48
    assert await num_taken(places, "a", "2", 100) == 8
    assert await num_taken(places, "b", "1", 100) == 6
    assert await num_taken(places, "c", "1", 100) == 2


@pytest.mark.asyncio
async def test_who_has_least_is_next() -> None:
    places = Places(4, owner_share=1, group_share=1)
    assert await num_taken(places, "a", "", 3) == 2
    assert await num_taken(places, "b", "", 3) == 1
    assert await num_taken(places, "c", "", 1) == 1
    waiting = {owner: tried(places, owner) for owner in "abcd"}
    await asyncio.sleep(0)
    assert places.num_waiting("d") == 1
    assert not any(one.done() for one in waiting.values())
    places.release("a")
    await asyncio.sleep(0)
    assert [owner for owner, one in waiting.items() if one.done()] == ["d"]
    places.release("a")
    await asyncio.sleep(0)
    assert [owner for owner, one in waiting.items() if one.done()] == ["a", "d"]
    for one in waiting.values():
        one.cancel()


@pytest.mark.asyncio
async def test_one_place_is_enough() -> None:
    places = Places(1)
    await places.take("a")
    waiting = tried(places, "a")
    await asyncio.sleep(0)
    assert not waiting.done()
    places.release("a")
    await waiting


@pytest.mark.asyncio
async def test_a_cancelled_wait_keeps_nothing() -> None:
    places = Places(1)
    await places.take("a")
    waiting = tried(places, "b")
    await asyncio.sleep(0)
    places.release("a")  # grants the place, and the cancellation comes before the task goes on
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    async with asyncio.timeout(1):
        await places.take("c")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12"), st.booleans()), max_size=60)
)
@settings(max_examples=60)
def test_no_more_places_than_there_are_and_none_lost(steps: list[tuple[str, str, bool]]) -> None:
    asyncio.run(_run(steps))


async def _run(steps: list[tuple[str, str, bool]]) -> None:
    places, tasks = Places(5), []
    held: list[tuple[str, str]] = []

    async def take(owner: str, group: str) -> None:
        await places.take(owner, group)
        held.append((owner, group))
        assert len(held) <= 5

    for owner, group, takes in steps:
        if takes or not held:
            tasks.append(asyncio.create_task(take(owner, group)))
        else:
            places.release(*held.pop(0))
        await asyncio.sleep(0)
    while not all(one.done() for one in tasks):
        assert held
        places.release(*held.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
