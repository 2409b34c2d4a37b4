"""Entry of ``gpupool top``: one screen as text, or the application."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpupool_tui.glyphs import ASCII, UNICODE
from gpupool_tui.once import ask_once, screen_text
from gpupool_tui.view import View, first_zoom_s
from gpupoold.api.client import AdminClient
from gpupoold.errors import UsageError

_DEFAULT_THEME = "dark"


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
        from gpupool_tui.app import TopApp
        from gpupool_tui.base_app import THEMES

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

    from gpupool_tui.base_app import THEMES

    if THEMES.get(theme, theme) not in BUILTIN_THEMES:
        names = ", ".join([*THEMES, *sorted(BUILTIN_THEMES)])
        raise UsageError(f"no theme is called {theme!r}", f"there are: {names}")
