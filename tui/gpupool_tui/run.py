"""Entry of ``gpupool top``: one screen as text, or the application."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpupool_tui.glyphs import ASCII, UNICODE
from gpupool_tui.once import ask_once, screen_text
from gpupool_tui.view import View
from gpupoold.api.client import AdminClient
from gpupoold.errors import UsageError


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line.

    ``theme`` is ``dark``, ``light``, ``terminal`` (its own colours: few bytes are sent) or one of
    Textual's names.
    """

    interval_s: float = 1.0
    theme: str = "dark"
    is_ascii: bool = False
    is_read_only: bool = False


def text_once(socket_path: Path, width: int, options: Options) -> str:
    """Return the screen as plain text; imports nothing of Textual's.

    Raises:
        GpupoolError: the daemon does not answer.
    """
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
        interval_s=options.interval_s,
        is_read_only=options.is_read_only,
    )
    app = TopApp(socket_path, picture, view)
    name = THEMES.get(options.theme, options.theme)
    if name not in app.available_themes:
        names = ", ".join([*THEMES, *sorted(app.available_themes)])
        raise UsageError(f"no theme is called {options.theme!r}", f"there are: {names}")
    app.theme = name
    app.run()
