"""The bounded buffer between serving and the disk."""

from __future__ import annotations

from collections import deque

from gpupool_state.rows import Entry


class Buffer:
    """At most ``capacity`` rows waiting to be written; beyond, the oldest rows are dropped."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._waiting: deque[Entry] = deque()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Entry) -> None:
        """Add a row for the next write."""
        self._waiting.append(item)
        self._trim()

    def take(self) -> list[Entry]:
        """Remove and return all waiting rows, oldest first."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def put_back(self, items: list[Entry]) -> None:
        """Put back rows of ``take`` that could not be written."""
        self._waiting.extendleft(reversed(items))
        self._trim()

    def drop(self, num_rows: int = 1) -> None:
        """Add rows outside the buffer to the count of dropped rows."""
        self.num_dropped += num_rows

    def _trim(self) -> None:
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.num_dropped += 1
