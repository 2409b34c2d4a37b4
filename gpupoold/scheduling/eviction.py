"""The order of page eviction for a switch. Pure: sizes in, an ordered list out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto


class Victim(Enum):
    """A kind of memory of a model without a turn."""

    FREE_KV = auto()  # extents without a live block: no copy
    WEIGHTS = auto()  # no copy now: the host snapshot stays; a copy back later
    LIVE_KV = auto()  # a copy to the host now, and back later
    RECOMPUTE = auto()  # all live KV of a model, without host memory: recomputed later


@dataclass(frozen=True, slots=True)
class PageHolding:
    """The pages of one model on the device.

    ``idle_s`` is the time since the last use. ``movable_kv_pages`` is the live KV for which the
    host has memory, None for all.
    """

    model: str
    num_live: int
    idle_s: float
    ttft_s: float
    next_deadline_s: float
    weight_pages: int
    free_kv_pages: int
    live_kv_pages: int
    movable_kv_pages: int | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction of a model's memory of kind ``victim``, which frees about ``num_pages``."""

    model: str
    victim: Victim
    num_pages: int


def plan_evictions(num_pages: int, holdings: Sequence[PageHolding]) -> list[Eviction]:
    """Return evictions in order until ``num_pages`` are free, or all if too few.

    Order: free KV; weights of models without live requests (by idle time; among similar idle times
    larger TTFT first); KV of paused requests (latest deadline first); weights of paused models. If
    paused KV alone does not suffice, the paused models' weights go first: dropping weights moves no
    bytes, and the remaining KV need not be copied out and in. KV without host memory is dropped
    last, and then all KV of a model.
    """
    idle = [h for h in holdings if not h.num_live]
    paused = sorted((h for h in holdings if h.num_live), key=lambda h: -h.next_deadline_s)
    idle.sort(key=lambda h: (-_idle_class(h.idle_s), -h.ttft_s, -h.idle_s))
    free_kv = _evictions(Victim.FREE_KV, [*idle, *paused])
    idle_weights = _evictions(Victim.WEIGHTS, idle)
    # A model without live requests has no live KV, unless the engine has not freed the KV yet.
    live_kv = _evictions(Victim.LIVE_KV, [*idle, *paused])
    paused_weights = _evictions(Victim.WEIGHTS, paused)
    gentle = [*free_kv, *idle_weights, *live_kv]
    if sum(eviction.num_pages for eviction in gentle) >= num_pages:
        return _until(num_pages, gentle)
    dropped = _evictions(Victim.RECOMPUTE, [*idle, *paused])
    return _until(num_pages, [*free_kv, *idle_weights, *paused_weights, *live_kv, *dropped])


def _idle_class(idle_s: float) -> int:
    """Return a class of idle times; times within a factor of about two share a class."""
    return int(math.log2(max(idle_s, 1.0)))


def _evictions(victim: Victim, holdings: Sequence[PageHolding]) -> list[Eviction]:
    return [
        Eviction(holding.model, victim, num_pages)
        for holding in holdings
        if (num_pages := _pages(victim, holding))
    ]


def _pages(victim: Victim, holding: PageHolding) -> int:
    movable = holding.movable_kv_pages
    moved = holding.live_kv_pages if movable is None else min(holding.live_kv_pages, movable)
    match victim:
        case Victim.FREE_KV:
            return holding.free_kv_pages
        case Victim.WEIGHTS:
            return holding.weight_pages
        case Victim.LIVE_KV:
            return moved
        case Victim.RECOMPUTE:
            return holding.live_kv_pages - moved


def _until(num_pages: int, evictions: list[Eviction]) -> list[Eviction]:
    chosen: list[Eviction] = []
    for eviction in evictions:
        if num_pages <= 0:
            break
        chosen.append(eviction)
        num_pages -= eviction.num_pages
    return chosen
