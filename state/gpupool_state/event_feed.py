"""The latest events in memory, for followers."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from gpupoold.domain import Event, EventLevel


class EventFeed:
    """Numbers events and keeps the latest ``num_held`` in memory, also when the disk fails.

    Not thread-safe: to be used in the event loop's thread.
    """

    def __init__(self, last_id: int, num_held: int) -> None:
        self.last_id = last_id
        self.floor_id = last_id  # events up to this id are not in memory
        self._held: deque[Event] = deque()
        self._num_held = num_held
        self._news = asyncio.Event()
        self._closed = False

    def publish(self, at: float, level: EventLevel, kind: str, subject: str, message: str) -> Event:
        """Add an event with the next id and wake all waiters."""
        self.last_id += 1
        event = Event(self.last_id, at, level, kind, subject, message)
        self._held.append(event)
        if len(self._held) > self._num_held:
            self.floor_id = self._held.popleft().id
        self._wake()
        return event

    def held_after(self, after_id: int) -> list[Event]:
        """Return the events in memory with larger ids, oldest first.

        No event is missing if ``after_id >= floor_id``.
        """
        return [event for event in self._held if event.id > after_id]

    async def wait(self, after_id: int, timeout_s: float) -> bool:
        """Wait for an event with a larger id; False after ``timeout_s`` or when closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.last_id <= after_id and not self._closed:
                    await self._news.wait()
        return self.last_id > after_id

    def close(self) -> None:
        """Wake all waiters; later calls of ``wait`` return at once."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # Each wake-up uses a new Event, so that every waiter on the old Event returns, and none is
        # left that a ``clear`` could miss.
        self._news.set()
        self._news = asyncio.Event()
