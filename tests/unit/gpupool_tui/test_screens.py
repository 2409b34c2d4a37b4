"""Whole screens, compared with stored ones: screens/*.txt.

After a change that is meant, ``GPUPOOL_WRITE_SCREENS=1 pytest tests/unit/gpupool_tui`` writes
them anew; look at the difference before you keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import pytest

from gpupool_tui.compose import compose
from gpupool_tui.picture import Picture
from gpupool_tui.run import screen_text
from gpupool_tui.text import ASCII, UNICODE, plain, width_of
from gpupool_tui.view import Panel, Sorting, View
from gpupoold.api.schemas import AdditionInfo
from tests.unit.gpupool_tui.pictures import device, picture, top

SCREENS = Path(__file__).parent / "screens"


def compare(name: str, text: str) -> None:
    path = SCREENS / f"{name}.txt"
    if os.environ.get("GPUPOOL_WRITE_SCREENS"):
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


def view(**changes: object) -> View:
    chosen = View(UNICODE, UTC)
    for name, value in changes.items():
        setattr(chosen, name, value)
    return chosen


def lost() -> View:
    return view(lost="connection lost, trying again: no daemon answers at /run/gpupool/admin.sock")


def filtered() -> View:
    chosen = view(filter="coder", focus=Panel.REQUESTS, is_read_only=True)
    chosen.selected[Panel.REQUESTS] = "05" + "5eed" * 7 + "00"
    chosen.sorting[Panel.MODELS] = Sorting("ttft", True)
    return chosen


CASES: dict[str, tuple[Callable[[], View], int, int]] = {
    "80x24": (view, 80, 24),
    "160x50": (view, 160, 50),
    "ascii-80x24": (lambda: view(glyphs=ASCII), 80, 24),
    "lost-80x24": (lost, 80, 24),
    "filtered-120x32": (filtered, 120, 32),
    "models-80x12": (lambda: view(maximised=Panel.MODELS, message="pinned"), 80, 12),
    "40x10": (view, 40, 10),
}


@pytest.mark.parametrize("name", CASES)
def test_screen(name: str) -> None:
    choose, width, height = CASES[name]
    screen = compose(picture(), choose(), width, height)
    assert len(screen.lines) == height
    assert all(width_of(line) == width for line in screen.lines)
    compare(name, "\n".join(plain(line) for line in screen.lines))


def test_styles_mark_what_matters_beside_words() -> None:
    screen = compose(picture(), view(), 80, 24)
    marked = [
        f"{y:2} {style:<10} {text.strip()}"
        for y, line in enumerate(screen.lines)
        for text, style in line
        if {"bad", "warn", "focus", "good", "switch"} & set(style.split()) and text.strip()
    ]
    compare("styles-80x24", "\n".join(marked))
    assert all(
        text.endswith("!") or y == 0 or not text[0].isdigit()
        for y, line in enumerate(screen.lines)
        for text, style in line
        if "bad" in style.split()
    )


@pytest.mark.parametrize("is_ascii", [False, True])
def test_one_screen_of_text_has_every_row(is_ascii: bool) -> None:
    text = screen_text(picture(), 100, is_ascii=is_ascii, zone=UTC)
    compare("once-ascii-100" if is_ascii else "once-100", text)
    assert text.isascii() == is_ascii


def test_a_daemon_with_nothing_yet() -> None:
    nothing = {"devices": [device(0, state="starting", on_turn=None)], "models": [], "turns": []}
    seen = Picture(top().model_copy(update=nothing | {"requests": [], "events": []}))
    screen = compose(seen, view(), 80, 24)
    compare("empty-80x24", "\n".join(plain(line) for line in screen.lines))


@pytest.mark.parametrize("width", [1, 5, 20, 39, 79, 131, 300])
@pytest.mark.parametrize("height", [1, 2, 5, 11, 30, 90])
def test_any_size_can_be_drawn(width: int, height: int) -> None:
    screen = compose(picture(), view(), width, height)
    assert len(screen.lines) == height
    assert all(width_of(line) == width for line in screen.lines)


def test_the_title_of_the_models_tells_what_is_being_added() -> None:
    shown = picture()
    download = AdditionInfo(name="llama\x1b[2J", stage="download", done_bytes=1, total_bytes=4)
    shown.latest.additions = [download, AdditionInfo(name="q", stage="check")]
    lines = [plain(line) for line in compose(shown, view(), 160, 50).lines]
    (title,) = [line for line in lines if "adding" in line]
    assert "adding llama\ufffd[2J: 1 B of 4 B, 25 % " in title
    assert "adding q: check" in title
    assert "\x1b" not in title
