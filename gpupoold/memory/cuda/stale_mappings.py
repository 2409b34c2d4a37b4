"""Mappings of pages that already have another owner.

The driver unmaps page by page: 36 ms for an 8B model. A page may be mapped at several addresses, so
the next owner need not wait. Nobody uses the former addresses until these are mapped again.
"""

from __future__ import annotations

from collections.abc import Callable


class StaleMappings:
    """Mapped ranges without an owner; ``unmap(address, num_bytes)`` removes mappings."""

    def __init__(self, unmap: Callable[[int, int], None]) -> None:
        self._unmap = unmap
        self._ranges: dict[int, int] = {}  # num_bytes by address, the oldest first

    @property
    def num_bytes(self) -> int:
        """Bytes of all stale mappings."""
        return sum(self._ranges.values())

    def add(self, address: int, num_bytes: int) -> None:
        """Keep a mapping whose pages have no owner any more."""
        self._ranges[address] = num_bytes

    def remove_at(self, address: int, num_bytes: int) -> None:
        """Remove every mapping that overlaps a range, as a whole."""
        end = address + num_bytes
        found = [at for at, size in self._ranges.items() if at < end and address < at + size]
        for at in found:
            self._unmap(at, self._ranges.pop(at))

    def remove_some(self, num_bytes: int) -> None:
        """Remove the oldest mappings, or parts of these, up to ``num_bytes``."""
        while self._ranges and num_bytes:
            at = next(iter(self._ranges))
            size = self._ranges.pop(at)
            part = min(size, num_bytes)
            self._unmap(at, part)
            num_bytes -= part
            if part < size:
                self._ranges = {at + part: size - part, **self._ranges}

    def remove_all(self) -> None:
        """Remove every mapping."""
        self.remove_some(self.num_bytes)
