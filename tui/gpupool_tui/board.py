"""The widget of the composed lines, its keys and its colours; only changed cells are redrawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget

from gpupool_tui.lanes import NUM_COLOURS
from gpupool_tui.text import Line, width_of

# Colours of models in lanes and tables, without red and amber, which have meanings.
_DARK_MODELS = (
    "#7aa2f7", "#9ece6a", "#bb9af7", "#7dcfff", "#73daca", "#f0a6ca", "#c3e88d", "#a9b1ff",
)  # fmt: skip
_LIGHT_MODELS = (
    "#2e5cb8", "#3b7a2a", "#7847bd", "#00708f", "#0f766e", "#b0407a", "#5a6b00", "#4a55c4",
)  # fmt: skip


class Key(NamedTuple):
    """Keys (Textual's names, separated by commas) for one action; ``shown`` is for people."""

    keys: str
    action: str
    shown: str
    meaning: str
    is_change: bool = False
    """True if the action changes the daemon, and is refused with read-only access."""


KEYS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    (
        "Moving",
        (
            Key("up,k", "move(-1)", "up k", "the row above"),
            Key("down,j", "move(1)", "down j", "the row below"),
            Key("pageup", "move(-10)", "PgUp", "ten rows up"),
            Key("pagedown", "move(10)", "PgDn", "ten rows down"),
            Key("home,g", "edge(-1)", "home g", "the first row"),
            Key("end,G", "edge(1)", "end G", "the last row"),
            Key("tab", "next_panel(1)", "tab", "the next panel"),
            Key("shift+tab", "next_panel(-1)", "shift-tab", "the panel before"),
            Key("1", "panel(1)", "1", "devices; twice: full screen"),
            Key("2", "panel(2)", "2", "turns, likewise"),
            Key("3", "panel(3)", "3", "models, likewise"),
            Key("4", "panel(4)", "4", "requests, likewise"),
            Key("5", "panel(5)", "5", "events, likewise"),
            Key("m", "maximise", "m", "full screen, and back"),
            Key("enter", "details", "enter", "details of the row"),
            Key("escape", "step_back", "esc", "back: close, shrink, clear the filter, or deselect"),
        ),
    ),
    (
        "View",
        (
            Key("slash", "filter", "/", "filter models, requests and events by a text"),
            Key("comma,less_than_sign", "sort(-1)", ", <", "sort by the column before"),
            Key("full_stop,greater_than_sign", "sort(1)", ". >", "sort by the next column"),
            Key("r", "reverse", "r", "reverse the order"),
            Key("f,space", "hold", "f space", "freeze the screen, and continue"),
            Key("left_square_bracket", "zoom(-1)", "[", "shorter time span of turns"),
            Key("right_square_bracket", "zoom(1)", "]", "longer time span of turns"),
            Key("plus,equals_sign", "interval(1)", "+", "update less often"),
            Key("minus", "interval(-1)", "-", "update more often"),
            Key("T", "theme", "T", "dark, light, the terminal's own colours"),
        ),
    ),
    (
        "Actions, after a question",
        (
            Key("p", "pin", "p", "model: pin the snapshot in host memory, or unpin", True),
            Key("u", "unload", "u", "model: unload from devices and host memory", True),
            Key("t", "targets", "t", "model: change the targets", True),
            Key("x", "cancel", "x", "request: cancel with an error", True),
            Key("d", "drain", "d", "device: drain, or undrain", True),
        ),
    ),
    (
        "Other",
        (Key("question_mark,h", "help", "? h", "this help"), Key("q", "quit", "q ^C", "quit")),
    ),
)


def all_keys() -> list[Key]:
    return [key for _, keys in KEYS for key in keys]


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
        self.lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        before, self.lines = self.lines, lines
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
        if y >= len(self.lines):
            return Strip.blank(self.size.width, self.palette.look("").style)
        return Strip(segments_of(self.lines[y], self.palette), self.size.width)

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


assert len(_DARK_MODELS) == len(_LIGHT_MODELS) == NUM_COLOURS
_TINT = 0.22

# The styles of words in the terminal's sixteen colours, and without colours.
_PLAIN_STYLES = {
    "bold": ("bold", "bold"),
    "dim": ("bright_black", "dim"),
    "header": ("bright_black", "underline"),
    "sorted": ("bold magenta", "bold"),
    "title": ("bold", "bold"),
    "focus": ("reverse bold", "reverse"),
    "rule": ("bright_black", ""),
    "brand": ("bold reverse", "reverse bold"),
    "good": ("green", ""),
    "warn": ("yellow", "bold"),
    "bad": ("bold red", "bold"),
    "weights": ("blue", ""),
    "prefetched": ("cyan", ""),
    "kv": ("green", ""),
    "other": ("yellow", "dim"),
    "free": ("bright_black", "dim"),
    "gauge": ("green", ""),
    "spark": ("green", ""),
    "switch": ("yellow", ""),
    "idle": ("bright_black", "dim"),
    "key": ("bold cyan", "bold"),
    "off": ("bright_black", "dim"),
    "selected": ("reverse", "reverse"),
    "cursor": ("bold", "bold"),
    "lost": ("dim", "dim"),
}
_TERMINAL_MODELS = (
    "blue", "green", "magenta", "cyan", "bright_blue", "bright_green", "bright_magenta",
    "bright_cyan",
)  # fmt: skip


class Look(NamedTuple):
    """A style, and two numbers: equal for styles that look the same, with and without text."""

    style: Style
    number: int
    back: int


class Palette:
    """Resolves words to styles; unknown words have no style. Combinations are cached.

    All styles lie upon ``base``.
    """

    def __init__(self, words: dict[str, Style], base: Style | None = None) -> None:
        self._words = words
        self._base = base or Style.null()
        self._known: dict[str, Look] = {}
        self._numbers: dict[object, int] = {}

    def look(self, words: str) -> Look:
        """Return the combined style of words, later ones above earlier ones."""
        found = self._known.get(words)
        if found is None:
            style = self._combined(words.split())
            blank = (style.bgcolor, style.reverse, style.underline)
            found = Look(style, self._number(style), self._number(blank))
            self._known[words] = found
        return found

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _combined(self, words: list[str]) -> Style:
        style = sum((self._words.get(word, Style.null()) for word in words), self._base)
        back = self._base.bgcolor
        if "run" in words and style.color is not None and back is not None:
            front, behind = Color.from_rich_color(style.color), Color.from_rich_color(back)
            style += Style(bgcolor=behind.blend(front, _TINT).rich_color)
        if "selected" in words:
            style += self._words.get("selected", Style.null())
        return style


def plain_palette() -> Palette:
    """For ``NO_COLOR``: bold, dim, underlined and reversed text only."""
    return Palette({word: Style.parse(text) for word, (_, text) in _PLAIN_STYLES.items()})


def palette_of(theme: Theme) -> Palette:
    """Return a theme's colours, completed from Textual's own themes.

    A theme of the terminal's own colours gets its sixteen colours.
    """
    if theme.ansi:
        texts = {f"m{number}": name for number, name in enumerate(_TERMINAL_MODELS)}
        texts |= {word: text for word, (text, _) in _PLAIN_STYLES.items()}
        return Palette({word: Style.parse(text) for word, text in texts.items()})
    colours = theme.to_color_system().generate()

    def one(name: str, default: str) -> Color:
        text = colours.get(name, default)
        return Color.parse(text if not text.startswith("auto") else default)

    back = one("background", "#121212" if theme.dark else "#e0e0e0")
    front = one("foreground", "#e0e0e0" if theme.dark else "#202020")
    accent = one("accent", "#ffa62b")
    primary = one("primary", "#0178d4")
    good = _readable(one("success", "#4ebf71"), back, theme.dark)
    warn = _readable(one("warning", "#ffa62b"), back, theme.dark)
    bad = _readable(one("error", "#ba3c5b"), back, theme.dark)
    muted = back.blend(front, 0.55)
    line = back.blend(front, 0.25)
    bar = back.blend(front, 0.10)
    words = {
        "bold": Style(bold=True),
        "dim": _style(muted),
        "header": _style(muted, bold=True),
        "sorted": _style(_readable(accent, back, theme.dark), bold=True),
        "title": _style(front, bold=True),
        "focus": _style(back, _readable(primary, back, theme.dark), bold=True),
        "rule": _style(line),
        "brand": _style(Color.parse("#ffffff"), primary, bold=True),
        "bar": _style(None, bar),
        "good": _style(good),
        "warn": _style(warn),
        "bad": _style(bad, bold=True),
        "weights": _style(_readable(primary, back, theme.dark)),
        "prefetched": _style(back.blend(_readable(primary, back, theme.dark), 0.6)),
        "kv": _style(good),
        "other": _style(warn),
        "free": _style(line),
        "gauge": _style(good),
        "spark": _style(good),
        "switch": _style(warn),
        "idle": _style(line),
        "info": _style(muted),
        "key": _style(_readable(accent, back, theme.dark), bold=True),
        "off": _style(line),
        "selected": _style(None, back.blend(primary, 0.35)),
        "cursor": _style(_readable(accent, back, theme.dark), bold=True),
        "lost": Style(color=muted.rich_color, bold=False),
    }
    hues = _DARK_MODELS if theme.dark else _LIGHT_MODELS
    words |= {f"m{number}": _style(Color.parse(text)) for number, text in enumerate(hues)}
    return Palette(words, _style(front, back))


def _style(front: Color | None, back: Color | None = None, *, bold: bool | None = None) -> Style:
    return Style(
        color=None if front is None else front.rich_color,
        bgcolor=None if back is None else back.rich_color,
        bold=bold,
    )


def _readable(colour: Color, back: Color, is_dark: bool) -> Color:
    """Return the colour, shifted to white or black if hard to read on the background."""
    for _ in range(8):
        if _contrast(colour, back) >= 4.0:
            break
        colour = colour.lighten(0.06) if is_dark else colour.darken(0.06)
    return colour


def _contrast(one: Color, other: Color) -> float:
    """Return the contrast of luminances by WCAG 2, 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Color) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(value) for value in colour.normalized)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
