"""Numbers as ranges: consecutive numbers are mapped, and copied, by one call."""

from __future__ import annotations

from collections.abc import Iterable


def as_ranges(numbers: Iterable[int]) -> list[range]:
    """Return ``numbers`` in order as ranges of consecutive numbers."""
    ranges: list[range] = []
    start = end = -1
    for number in numbers:
        if number != end:
            if start != end:
                ranges.append(range(start, end))
            start = number
        end = number + 1
    if start != end:
        ranges.append(range(start, end))
    return ranges
