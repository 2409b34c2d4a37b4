"""Virtual time: a clock that only events advance, and the event queue.

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

_MIN_COMPACTION = 64


class EventPriority(IntEnum):
    """The order of simultaneous events: ends precede arrivals and make space for them."""

    COMPLETION = 0
    ARRIVAL = 1


class VirtualClock:
    """Seconds since the start of the run."""

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        """Set the present time to ``at_s``.

        Raises:
            ValueError: ``at_s`` lies in the past or is not finite.
        """
        if not (math.isfinite(at_s) and at_s >= self._now_s):
            raise ValueError(f"the clock is at {self._now_s} s and cannot go to {at_s} s")
        self._now_s = at_s


class Scheduled(Generic[E]):
    """An event with its time and class; the handle for cancelling."""

    __slots__ = ("_queue", "at_s", "event", "priority")

    def __init__(self, queue: EventQueue[E], at_s: float, event: E, priority: int) -> None:
        self._queue: EventQueue[E] | None = queue
        self.at_s = at_s
        self.event = event
        self.priority = priority

    @property
    def is_waiting(self) -> bool:
        return self._queue is not None

    def cancel(self) -> bool:
        """Remove the event from its queue; return False if already popped or cancelled."""
        queue = self._leave()
        if queue is None:
            return False
        queue._on_cancel()
        return True

    def _leave(self) -> EventQueue[E] | None:
        queue, self._queue = self._queue, None
        return queue


class EventQueue(Generic[E]):
    """Future events. ``pop`` returns the next event and advances the clock."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        # The third item is unique, so comparing two entries never compares handles.
        self._heap: list[tuple[float, int, int, Scheduled[E]]] = []
        self._numbers = itertools.count()
        self._num_cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_cancelled

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def next_at_s(self) -> float | None:
        """Time of the next event; None without events."""
        self._drop_cancelled()
        return self._heap[0][0] if self._heap else None

    def schedule(
        self, at_s: float, event: E, priority: int = EventPriority.COMPLETION
    ) -> Scheduled[E]:
        """Schedule ``event`` at ``at_s``, which may be now.

        Raises:
            ValueError: ``at_s`` lies in the past or is not finite.
        """
        if not (math.isfinite(at_s) and at_s >= self.now_s):
            raise ValueError(f"{event!r} at {at_s} s: the present is {self.now_s} s")
        handle = Scheduled(self, at_s, event, priority)
        heapq.heappush(self._heap, (at_s, priority, next(self._numbers), handle))
        return handle

    def pop(self) -> Scheduled[E] | None:
        """Return the next event and advance the clock to its time; None without events."""
        self._drop_cancelled()
        if not self._heap:
            return None
        handle = heapq.heappop(self._heap)[-1]
        handle._leave()
        self.clock.advance_to(handle.at_s)
        return handle

    def _on_cancel(self) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > max(_MIN_COMPACTION, len(self)):
            self._heap = [entry for entry in self._heap if entry[-1].is_waiting]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def _drop_cancelled(self) -> None:
        while self._heap and not self._heap[0][-1].is_waiting:
            heapq.heappop(self._heap)
            self._num_cancelled -= 1
