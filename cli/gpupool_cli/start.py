"""Entry point of the console script.

``gpupool top`` is to be there at once: it does not wait for the other commands to be loaded.
Ctrl-C while the commands are loaded ends the process as later, without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpupoold.system.interrupts import INTERRUPTED, ended_by_interrupts


def main() -> None:
    with ended_by_interrupts():
        run = _load()
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _load() -> Callable[[], None]:
    """Return the entry point of the command, with all that it imports."""
    if sys.argv[1:2] == ["top"]:
        from gpupool_cli.top import alone

        return alone
    from gpupool_cli.main import main as every_command

    return every_command


if __name__ == "__main__":
    main()
