"""What ``SIGHUP`` means: a reload, or that the terminal in which the daemon runs is closed."""

from __future__ import annotations

import os
from collections.abc import Callable


def hangup_handler(
    fd: int, on_closed: Callable[[], None], on_reload: Callable[[], None]
) -> Callable[[], None]:
    """A handler that calls ``on_closed`` when ``fd`` was a terminal and is none any more."""
    had_terminal = os.isatty(fd)

    def handle() -> None:
        if had_terminal and not os.isatty(fd):
            on_closed()
        else:
            on_reload()

    return handle
