"""What the person at the screen has chosen to see."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import tzinfo
from enum import Enum

from gpupool_tui.glyphs import UNICODE, Glyphs


class Panel(Enum):
    """The panels in their order on the screen; their numbers are their keys."""

    DEVICES = 1
    LANES = 2
    MODELS = 3
    REQUESTS = 4
    EVENTS = 5

    @property
    def title(self) -> str:
        """As it stands over the panel."""
        return self.name.capitalize() if self is not Panel.LANES else "Turns"


ZOOMS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
INTERVALS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Sorting:
    """A table's order: the key of a column, and whether it is turned round."""

    column: str
    is_reversed: bool = False


@dataclass(slots=True)
class View:
    """Everything that keys change. ``selected`` has the keys of rows; ``zone`` None is this
    machine's time zone."""

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
    zoom_s: float = 0.5
    interval_s: float = 1.0
    is_held: bool = False
    is_read_only: bool = False
    message: str = ""
    message_style: str = ""
    lost: str = ""
    """Why there is no connection; empty while there is one."""

    def zoom(self, step: int) -> None:
        """More or less time in a cell of the lanes."""
        self.zoom_s = _stepped(ZOOMS_S, self.zoom_s, step)

    def change_interval(self, step: int) -> None:
        """Ask less or more often."""
        self.interval_s = _stepped(INTERVALS_S, self.interval_s, step)

    def go_to(self, panel: Panel, visible: frozenset[Panel]) -> None:
        """Jump to a panel; to the one where one is, or that had no room: let it have all."""
        if self.maximised is not None:
            self.maximised = None if panel is self.maximised else panel
        elif panel is self.focus or panel not in visible:
            self.maximised = panel
        self.focus = panel


def _stepped(values: tuple[float, ...], value: float, step: int) -> float:
    """The next larger or smaller one; the last ones stay."""
    if step > 0:
        return next((one for one in values if one > value), values[-1])
    return next((one for one in reversed(values) if one < value), values[0])
