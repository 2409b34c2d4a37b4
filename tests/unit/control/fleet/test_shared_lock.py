"""A lock that many may share: who is inside together, and who goes first."""

from __future__ import annotations

import asyncio

from gpupoold.control.fleet.shared_lock import SharedLock


async def test_many_share_and_one_is_alone() -> None:
    lock, inside, seen = SharedLock(), 0, []

    async def share() -> None:
        nonlocal inside
        async with lock.shared():
            inside += 1
            await asyncio.sleep(0)
            seen.append(("shared", inside))
            await asyncio.sleep(0)
            inside -= 1

    async def alone() -> None:
        async with lock.alone():
            seen.append(("alone", inside))

    await asyncio.gather(share(), share(), alone(), share(), alone())
    assert seen == [("shared", 2), ("shared", 2), ("alone", 0), ("shared", 1), ("alone", 0)]


async def test_who_gives_up_waiting_stands_in_nobodys_way() -> None:
    lock = SharedLock()
    async with lock.shared():
        waiting = asyncio.create_task(lock.alone().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), lock.shared():
            pass
    async with asyncio.timeout(1), lock.alone():
        pass


async def test_an_error_inside_leaves_it_free() -> None:
    lock = SharedLock()
    for way in (lock.shared, lock.alone):
        try:
            async with way():
                raise ValueError
        except ValueError:
            pass
    async with asyncio.timeout(1), lock.alone():
        pass
