"""The heights of the panels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpupool_tui.view import Panel


@dataclass(frozen=True, slots=True)
class Wish:
    """Lines of a panel with its title; with fewer than ``least`` the panel is left out."""

    least: int
    good: int
    most: int


def share_out(wishes: dict[Panel, Wish], height: int, maximised: Panel | None) -> dict[Panel, int]:
    """Return the lines of each visible panel.

    First the good heights of models, devices and lanes, or the least heights of as many as fit;
    then the others; then up to the largest useful heights.
    """
    if maximised is not None:
        return {maximised: height}
    lines: dict[Panel, int] = {}
    left = height
    for panels in (_FIRST, _THEN):
        for panel in panels:
            if wishes[panel].least <= left:
                lines[panel] = wishes[panel].least
                left -= wishes[panel].least
        left = _grow(lines, wishes, panels, left, lambda wish: wish.good)
    left = _grow_evenly(lines, wishes, left)
    last = max(lines, key=lambda panel: panel.value, default=None)
    if last is not None:
        lines[last] += left
    return {panel: lines[panel] for panel in Panel if panel in lines}


_FIRST = (Panel.MODELS, Panel.DEVICES, Panel.LANES)
_THEN = (Panel.EVENTS, Panel.REQUESTS)


def _grow(
    lines: dict[Panel, int],
    wishes: dict[Panel, Wish],
    panels: Sequence[Panel],
    left: int,
    limit: Callable[[Wish], int],
) -> int:
    """Grow visible panels up to a limit; return the remaining lines."""
    for panel in panels:
        if panel in lines:
            more = min(left, max(0, limit(wishes[panel]) - lines[panel]))
            lines[panel] += more
            left -= more
    return left


def _grow_evenly(lines: dict[Panel, int], wishes: dict[Panel, Wish], left: int) -> int:
    """Grow panels by a line in turn, while lines remain and panels can use them."""
    growing = [panel for panel in (*_FIRST, *_THEN) if panel in lines]
    while left and growing:
        growing = [panel for panel in growing if lines[panel] < wishes[panel].most]
        for panel in growing[:left]:
            lines[panel] += 1
            left -= 1
    return left


def wishes(
    num_devices: int, num_models: int, num_requests: int, num_events: int
) -> dict[Panel, Wish]:
    """Return the useful heights of the panels for these numbers of rows."""
    few = min(num_devices, 4) or 1
    return {
        Panel.DEVICES: Wish(2 + min(few, 2), 2 + few, 2 + max(1, num_devices)),
        Panel.LANES: Wish(2 + min(few, 2), 2 + few, 2 + max(1, num_devices)),
        Panel.MODELS: Wish(5, 2 + min(max(3, num_models), 8), 2 + num_models),
        Panel.EVENTS: Wish(3, 5, 2 + min(num_events, 10)),
        Panel.REQUESTS: Wish(4, 2 + min(max(2, num_requests), 6), 2 + min(num_requests, 20)),
    }
