"""The meaning of ``SIGHUP``: a reload, or the end of the daemon's terminal."""

from __future__ import annotations

import os
from collections.abc import Callable


def hangup_handler(
    fd: int, on_closed: Callable[[], None], on_reload: Callable[[], None]
) -> Callable[[], None]:
    """Return a handler that calls ``on_closed`` if ``fd`` was a terminal and no longer is.

    Otherwise the handler calls ``on_reload``.
    """
    had_terminal = os.isatty(fd)

    def handle() -> None:
        if had_terminal and not os.isatty(fd):
            on_closed()
        else:
            on_reload()

    return handle
