"""Entry point of the console script.

Ctrl-C while the commands are loaded ends the process as later, without a traceback.
"""

from __future__ import annotations

import sys

from gpupoold.system.interrupts import INTERRUPTED, ended_by_interrupts


def main() -> None:
    with ended_by_interrupts():
        from gpupool_cli.main import main as run
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
