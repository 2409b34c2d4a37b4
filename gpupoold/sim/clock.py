"""Virtual time: the queue of future events, which alone advance the time.

The order of events is deterministic: by time, then by priority class, then by the order of
scheduling. The same order holds for an event scheduled at the present time. Time never goes back.
No wall clock is read.
"""

from __future__ import annotations

import heapq
import itertools
import math
from enum import IntEnum
from typing import Generic, TypeVar

E = TypeVar("E")


class EventPriority(IntEnum):
    """The order of simultaneous events: ends precede arrivals and make space for them."""

    COMPLETION = 0
    ARRIVAL = 1


class Scheduled(Generic[E]):
    """An event with its time; the handle for cancelling."""

    __slots__ = ("at_s", "event", "is_waiting")

    def __init__(self, at_s: float, event: E) -> None:
        self.at_s = at_s
        self.event = event
        self.is_waiting = True

    def cancel(self) -> bool:
        """Remove the event from its queue; return False if already popped or cancelled."""
        was_waiting, self.is_waiting = self.is_waiting, False
        return was_waiting


class EventQueue(Generic[E]):
    """Future events. ``pop`` returns the next event and advances the time ``now_s`` to the event's.

    Cancelled events take memory up to their times.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        """Seconds since the start of the run."""
        # The third item is unique, so comparing two entries never compares handles.
        self._heap: list[tuple[float, int, int, Scheduled[E]]] = []
        self._numbers = itertools.count()

    @property
    def next_at_s(self) -> float | None:
        """Time of the next event; None without events."""
        while self._heap and not self._heap[0][-1].is_waiting:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def advance_to(self, at_s: float) -> None:
        """Set the present time to ``at_s``.

        Raises ValueError if ``at_s`` lies in the past or is not finite.
        """
        if not (math.isfinite(at_s) and at_s >= self.now_s):
            raise ValueError(f"the clock is at {self.now_s} s and cannot go to {at_s} s")
        self.now_s = at_s

    def schedule(
        self, at_s: float, event: E, priority: int = EventPriority.COMPLETION
    ) -> Scheduled[E]:
        """Schedule ``event`` at ``at_s``, which may be now.

        Raises ValueError if ``at_s`` lies in the past or is not finite.
        """
        if not (math.isfinite(at_s) and at_s >= self.now_s):
            raise ValueError(f"{event!r} at {at_s} s: the present is {self.now_s} s")
        handle = Scheduled(at_s, event)
        heapq.heappush(self._heap, (at_s, priority, next(self._numbers), handle))
        return handle

    def pop(self) -> Scheduled[E] | None:
        """Return the next event and advance to its time; None without events."""
        if self.next_at_s is None:
            return None
        handle = heapq.heappop(self._heap)[-1]
        handle.is_waiting = False
        self.advance_to(handle.at_s)
        return handle
