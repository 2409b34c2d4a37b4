"""Where the daemon's own log goes: a file in ``paths.log_dir``, and standard error.

Where standard error is systemd's journal, records go there with their fields.
"""

from __future__ import annotations

import logging
import os
import sys

from gpupoold.config import Settings
from gpupoold.errors import Failed
from gpupoold.journal import JournalHandler, is_journal

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_logging(settings: Settings) -> None:
    """Set the root logger up, once per process.

    Raises:
        Failed: the log file cannot be written.
    """
    try:
        file = logging.FileHandler(settings.paths.log_dir / "gpupoold.log")
    except OSError as error:
        raise Failed(
            f"{settings.paths.log_dir}: cannot be written: {error.strerror}",
            "change paths.log_dir or its permissions",
        ) from error
    handlers: list[logging.Handler] = [file]
    if is_journal(sys.stderr.fileno(), os.environ):
        handlers.append(JournalHandler())
        handlers[-1].setFormatter(logging.Formatter())  # the rest is in its fields
    else:
        handlers.append(logging.StreamHandler(sys.stderr))
    # Sets the formatters of those that have none.
    logging.basicConfig(level=settings.log.level.upper(), format=_FORMAT, handlers=handlers)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
