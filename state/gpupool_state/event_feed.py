"""Live events: numbered, stored for a while, awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from gpupool_state.rows import EventLevel, EventRow


class EventFeed:
    """Numbers events and holds the latest in memory, whatever becomes of the disk.

    Not thread-safe: belongs to the event loop's thread.
    """

    def __init__(self, last_id: int, num_held: int) -> None:
        self.last_id = last_id
        self.floor_id = last_id  # events up to here are not, or no longer, held
        self._held: deque[EventRow] = deque()
        self._num_held = num_held
        self._news = asyncio.Event()
        self._closed = False

    def publish(
        self, at: float, level: EventLevel, kind: str, subject: str, message: str
    ) -> EventRow:
        """Number a new event and wake all waiters."""
        self.last_id += 1
        event = EventRow(self.last_id, at, level, kind, subject, message)
        self._held.append(event)
        if len(self._held) > self._num_held:
            self.floor_id = self._held.popleft().id
        self._wake()
        return event

    def held_after(self, after_id: int) -> list[EventRow]:
        """The held events with larger ids, oldest first; complete if ``after_id >= floor_id``."""
        return [event for event in self._held if event.id > after_id]

    async def wait(self, after_id: int, timeout_s: float) -> bool:
        """Wait for an event with a larger id; False after ``timeout_s`` or when closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.last_id <= after_id and not self._closed:
                    await self._news.wait()
        return self.last_id > after_id

    def close(self) -> None:
        """Wake all waiters for the end."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # A fresh Event each time: those who waited on the old one all see it set.
        self._news.set()
        self._news = asyncio.Event()
