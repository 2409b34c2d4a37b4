"""Entry of ``gpupool top``: one screen as text, or the application."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path

from gpupool_tui.compose import compose
from gpupool_tui.picture import Picture
from gpupool_tui.text import ASCII, UNICODE, plain
from gpupool_tui.view import View, first_zoom_s, wishes
from gpupoold.api.client import AdminClient
from gpupoold.errors import UsageError

_DEFAULT_THEME = "dark"

_NUM_TURNS = 2000
_NUM_REQUESTS = 20
_NUM_EVENTS = 10


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    ``theme`` is ``dark``, ``light``, ``terminal`` (its own colours: few bytes are sent) or one of
    Textual's names.
    """

    interval_s: float = 1.0
    theme: str = _DEFAULT_THEME
    is_ascii: bool = False
    is_read_only: bool = False


def text_once(socket_path: Path, width: int, options: Options) -> str:
    """Return the screen as plain text; with the default theme nothing of Textual's is imported.

    Raises:
        GpupoolError: the daemon does not answer.
        UsageError: there is no such theme.
    """
    _check_theme(options.theme)
    with AdminClient(socket_path) as client:
        return screen_text(ask_once(client), width, is_ascii=options.is_ascii)


def run(socket_path: Path, options: Options) -> None:
    """The application, until it is left.

    Raises:
        GpupoolError: the daemon does not answer to begin with.
        UsageError: there is no such theme.
    """
    with AdminClient(socket_path) as client, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask_once, client)
        # Plain text does not need Textual; a terminal imports Textual while the daemon answers.
        from gpupool_tui.app import THEMES, TopApp

        picture = asked.result()
    view = View(
        glyphs=ASCII if options.is_ascii else UNICODE,
        zoom_s=first_zoom_s(picture.turns_s()),
        interval_s=options.interval_s,
        is_read_only=options.is_read_only,
    )
    app = TopApp(socket_path, picture, view)
    _check_theme(options.theme)
    app.theme = THEMES.get(options.theme, options.theme)
    app.run()


def _check_theme(theme: str) -> None:
    if theme == _DEFAULT_THEME:
        return
    from textual.theme import BUILTIN_THEMES

    from gpupool_tui.app import THEMES

    if THEMES.get(theme, theme) not in BUILTIN_THEMES:
        names = ", ".join([*THEMES, *sorted(BUILTIN_THEMES)])
        raise UsageError(f"no theme is called {theme!r}", f"there are: {names}")


def screen_text(picture: Picture, width: int, *, is_ascii: bool, zone: tzinfo | None = None) -> str:
    """Return all panels as text of any height, without the hints of keys."""
    zoom_s = first_zoom_s(picture.turns_s())
    view = View(ASCII if is_ascii else UNICODE, zone, zoom_s=zoom_s, interval_s=0.0)
    top, num_events = picture.latest, len(picture.events)
    rows = wishes(len(top.devices), len(top.models), len(top.requests), num_events)
    height = 2 + sum(wish.most for wish in rows.values())
    lines = compose(picture, view, width, height).lines[:-1]
    texts = [plain(line) for line in lines]
    while texts and not texts[-1]:
        texts.pop()
    return "\n".join(texts)


def ask_once(client: AdminClient) -> Picture:
    return Picture(client.top(turns=_NUM_TURNS, requests=_NUM_REQUESTS, events=_NUM_EVENTS))
