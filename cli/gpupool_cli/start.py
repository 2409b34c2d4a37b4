"""Entry point of the console script.

``gpupool top`` is to be there at once: it does not wait for the other commands to be loaded.
"""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["top"]:
        from gpupool_cli.top import alone

        alone()
    else:
        from gpupool_cli.main import main as every_command

        every_command()


if __name__ == "__main__":
    main()
