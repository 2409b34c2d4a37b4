"""The table of all keys, for bindings, the help screen and the docs."""

from __future__ import annotations

from typing import NamedTuple


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
