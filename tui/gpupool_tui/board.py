"""A widget for composed lines that redraws only changed cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gpupool_tui.keys import all_keys
from gpupool_tui.palette import Look, Palette
from gpupool_tui.text import Line, width_of


class Board(Widget, can_focus=True):
    """The whole screen. Textual lays nothing out: a new picture costs only its changes."""

    # Bindings of the board and not of the application, so that an open dialog or a filter
    # gets the keys.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key.keys, f"app.{key.action}", key.meaning, show=False) for key in all_keys()
    ]
    DEFAULT_CSS = "Board { width: 1fr; height: 1fr; }"

    class Clicked(Message):
        """A click on a line, or a turn of the wheel above a line (``step`` is not 0)."""

        def __init__(self, y: int, step: int) -> None:
            super().__init__()
            self.y = y
            self.step = step

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.palette = palette
        self._lines: Sequence[Line] = ()

    @property
    def lines(self) -> Sequence[Line]:
        return self._lines

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [
            Region(start, y, end - start, 1)
            for y, (old, new) in enumerate(zip(before, lines, strict=True))
            if old != new
            for start, end in (difference(old, new),)
        ]
        if changed:
            self.refresh(*changed)

    def repaint(self, palette: Palette) -> None:
        """Show the same in other colours."""
        self.palette = palette
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget for Textual."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.palette.look("").style)
        return Strip(segments_of(self._lines[y], self.palette), self.size.width)

    def on_click(self, event: events.Click) -> None:
        """Textual's: a line was clicked."""
        self.post_message(self.Clicked(event.y, 0))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.post_message(self.Clicked(event.y, 1))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.post_message(self.Clicked(event.y, -1))


def segments_of(line: Line, palette: Palette) -> list[Segment]:
    """Return a line as Textual's segments.

    Blanks join the text before them where both look the same: a change of style takes more bytes
    than most words.
    """
    segments: list[Segment] = []
    texts: list[str] = []
    last: Look | None = None
    for text, words in line:
        look = palette.look(words)
        is_same = last is not None and (
            look.number == last.number or (look.back == last.back and text.isspace())
        )
        if not is_same:
            if last is not None:
                segments.append(Segment("".join(texts), last.style))
            texts, last = [], look
        texts.append(text)
    if last is not None:
        segments.append(Segment("".join(texts), last.style))
    return segments


def difference(old: Line, new: Line) -> tuple[int, int]:
    """Return the cells from the first to the last difference of two lines of one width.

    One stretch per line: Textual sends a line's cells from its beginning for each stretch.
    """
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    start = width_of(new[:first])
    end = max(width_of(old), width_of(new)) - width_of(new[len(new) - last :])
    return start, max(end, start + 1)
