"""Bars and sparklines of text."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.glyphs import Glyphs
from gpupool_tui.text import Line, Span

# Lower bounds of the levels for shares of tokens in time, close together near 1.
LEVEL_STARTS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


def cells_of(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the cells of each part within ``width``.

    No positive part vanishes; the sum is rounded, and rounding losses go to the largest remainders.
    """
    if whole <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [max(0.0, part) / whole * width for part in parts]
    counts = [max(int(one), 1 if one > 0 else 0) for one in exact]
    wanted = min(width, round(sum(exact)))
    wanted = max(wanted, min(width, sum(one > 0 for one in exact)))
    by_remainder = sorted(range(len(parts)), key=lambda i: exact[i] - counts[i])
    while sum(counts) < wanted:
        counts[by_remainder.pop()] += 1
    while sum(counts) > wanted:
        largest = max(range(len(parts)), key=lambda i: counts[i])
        counts[largest] -= 1
    return counts


def memory_bar(
    weights: int, prefetched: int, kv: int, free: int, total: int, width: int, glyphs: Glyphs
) -> Line:
    """Return a device's memory as a bar: weights, prefetched weights, KV, other, free."""
    plain_weights = max(0, weights - prefetched)
    other = max(0, total - weights - kv - free)
    parts = (plain_weights, prefetched, kv, other)
    if total <= 0:
        return (Span(" " * width),)
    counts = cells_of(parts, total, width)
    names = ("weights", "prefetched", "kv", "other")
    marks = (glyphs.weights, glyphs.prefetched, glyphs.kv, glyphs.other)
    spans = [
        Span(mark * number, name)
        for mark, name, number in zip(marks, names, counts, strict=True)
        if number
    ]
    left = width - sum(counts)
    return (*spans, Span(glyphs.free * left, "free")) if left else tuple(spans)


def gauge(share: float, width: int, glyphs: Glyphs, style: str = "gauge") -> Line:
    """Return a bar for a share from 0 to 1."""
    [full] = cells_of([min(1.0, share)], 1.0, width)
    return (Span(glyphs.gauge * full, style), Span(glyphs.rest * (width - full), "dim"))


def sparkline(shares: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """Return shares (0 to 1) as a line, the newest at the right, averaged in groups to fit.

    Unknown values are left out.
    """
    if not shares or width <= 0:
        return glyphs.nothing * width
    per_cell = -(-len(shares) // width)
    # The last group is complete, because people look at the newest value.
    start = len(shares) % per_cell
    groups = [shares[i : i + per_cell] for i in range(start, len(shares), per_cell)]
    if start:
        groups.insert(0, shares[:start])
    drawn = "".join(_level(group, glyphs) for group in groups[-width:])
    return glyphs.nothing * (width - len(drawn)) + drawn


def _level(group: Sequence[float | None], glyphs: Glyphs) -> str:
    known = [share for share in group if share is not None]
    if not known:
        return glyphs.nothing
    mean = sum(known) / len(known)
    level = sum(mean >= start for start in LEVEL_STARTS)
    return glyphs.levels[max(1, level) - 1]
