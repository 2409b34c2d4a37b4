"""Entry point of the console script.

``gpupool top`` is to be there at once: it does not wait for the other commands to be loaded.
Ctrl-C while the commands are loaded ends the process as later, without a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    before = signal.signal(signal.SIGINT, _end)
    run = _load()
    signal.signal(signal.SIGINT, before)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _load() -> Callable[[], None]:
    """Return the entry point of the command, with all that it imports."""
    if sys.argv[1:2] == ["top"]:
        from gpupool_cli.top import alone

        return alone
    from gpupool_cli.main import main as every_command

    return every_command


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
