"""The bounded buffer between serving and the disk."""

from __future__ import annotations

from collections import deque

from gpupool_state.rows import Entry


class Buffer:
    """Rows waiting to be written, at most ``capacity``; then the oldest are dropped."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._waiting: deque[Entry] = deque()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: Entry) -> None:
        """Keep ``item`` for the next write."""
        self._waiting.append(item)
        self._trim()

    def take(self) -> list[Entry]:
        """All waiting rows, oldest first; the buffer is empty afterwards."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def put_back(self, items: list[Entry]) -> None:
        """Return rows from ``take`` that could not be written."""
        self._waiting.extendleft(reversed(items))
        self._trim()

    def drop(self, num_rows: int = 1) -> None:
        """Count rows that will never be written."""
        self.num_dropped += num_rows

    def _trim(self) -> None:
        while len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.num_dropped += 1
