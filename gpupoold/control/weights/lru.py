"""Choice of snapshots to evict, and the order of loading at the start. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[K]):
    """A snapshot of ``num_bytes``; ``last_used_at`` is wall-clock seconds.

    ``key`` names the snapshot, or its model.
    """

    key: K
    num_bytes: int
    last_used_at: float
    is_pinned: bool = False
    is_busy: bool = False


def choose_victims(candidates: Sequence[Candidate[K]], short_bytes: int) -> list[K] | None:
    """Return the snapshots to evict for ``short_bytes``, None if too few.

    Pinned and busy snapshots stay. Least recently used snapshots go first; a chosen
    snapshot stays nevertheless if the other chosen snapshots suffice.
    """
    idle = [one for one in candidates if not one.is_pinned and not one.is_busy]
    chosen: list[Candidate[K]] = []
    freed_bytes = 0
    for one in sorted(idle, key=lambda one: one.last_used_at):
        if freed_bytes >= short_bytes:
            break
        chosen.append(one)
        freed_bytes += one.num_bytes
    if freed_bytes < short_bytes:
        return None
    for one in reversed(chosen):
        if freed_bytes - one.num_bytes >= short_bytes:
            chosen = [other for other in chosen if other is not one]
            freed_bytes -= one.num_bytes
    return [one.key for one in chosen]


def start_order(candidates: Sequence[Candidate[K]], budget_bytes: int) -> list[K]:
    """Return the order in which to load all models within the budget.

    Pinned snapshots come first, then the most recently used snapshots within the budget. All other
    models need memory only while loading, and are loaded before the last snapshots that stay.
    """
    ranked = sorted(candidates, key=lambda one: (not one.is_pinned, -one.last_used_at))
    num_kept, kept_bytes = 0, 0
    for one in ranked:
        if kept_bytes + one.num_bytes > budget_bytes:
            break
        num_kept, kept_bytes = num_kept + 1, kept_bytes + one.num_bytes
    others = ranked[num_kept:]
    largest_bytes = max((one.num_bytes for one in others), default=0)
    num_first = num_kept
    while num_first and kept_bytes + largest_bytes > budget_bytes:
        num_first -= 1
        kept_bytes -= ranked[num_first].num_bytes
    order = [*ranked[:num_first], *others, *ranked[num_first:num_kept]]
    return [one.key for one in order]
