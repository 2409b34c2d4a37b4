"""The user's choices at the screen, and the heights of the panels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from enum import Enum
from statistics import median

from gpupool_tui.text import UNICODE, Glyphs


class Panel(Enum):
    """The panels in their order on the screen; their numbers are their keys."""

    DEVICES = 1
    LANES = 2
    MODELS = 3
    REQUESTS = 4
    EVENTS = 5

    @property
    def title(self) -> str:
        return self.name.capitalize() if self is not Panel.LANES else "Turns"


ZOOMS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Times of a cell of the lanes."""
_FIRST_ZOOM_S = 0.5
_CELLS_OF_NAME = 5
INTERVALS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Sorting:
    """A table's order: the key of a column, and whether it is reversed."""

    column: str
    is_reversed: bool = False


@dataclass(slots=True)
class View:
    """Everything that keys change.

    ``selected`` has the keys of rows; ``zone`` None is this machine's time zone, ``interval_s`` 0
    asks the daemon once.
    """

    glyphs: Glyphs = UNICODE
    zone: tzinfo | None = None
    focus: Panel = Panel.MODELS
    maximised: Panel | None = None
    sorting: dict[Panel, Sorting] = field(
        default_factory=lambda: {
            Panel.DEVICES: Sorting("device"),
            Panel.MODELS: Sorting("live"),
            Panel.REQUESTS: Sorting("age"),
        }
    )
    selected: dict[Panel, str] = field(default_factory=dict)
    filter: str = ""
    zoom_s: float = _FIRST_ZOOM_S
    interval_s: float = 1.0
    is_held: bool = False
    is_read_only: bool = False
    message: str = ""
    message_style: str = ""
    lost: str = ""
    """The reason for a lost connection, else empty."""

    def zoom(self, step: int) -> None:
        """More or less time in a cell of the lanes."""
        self.zoom_s = _stepped(ZOOMS_S, self.zoom_s, step)

    def change_interval(self, step: int) -> None:
        self.interval_s = _stepped(INTERVALS_S, self.interval_s, step)

    def go_to(self, panel: Panel, visible: Collection[Panel]) -> None:
        """Jump to a panel; maximise the present one, or one without space."""
        if self.maximised is not None:
            self.maximised = None if panel is self.maximised else panel
        elif panel is self.focus or panel not in visible:
            self.maximised = panel
        self.focus = panel


def first_zoom_s(turns_s: Sequence[float]) -> float:
    """Return a cell's time at which names fit into half of the turns: at most half a second."""
    most_s = min(_FIRST_ZOOM_S, median(turns_s) / _CELLS_OF_NAME) if turns_s else _FIRST_ZOOM_S
    return max((span_s for span_s in ZOOMS_S if span_s <= most_s), default=ZOOMS_S[0])


def _stepped(values: tuple[float, ...], value: float, step: int) -> float:
    """Return the next larger or smaller value; the ends stay."""
    if step > 0:
        return next((larger for larger in values if larger > value), values[-1])
    return next((smaller for smaller in reversed(values) if smaller < value), values[0])


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
