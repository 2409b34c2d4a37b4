"""Where the daemon's own log goes: a file in ``paths.log_dir``, and standard error.

Where standard error is systemd's journal, records go there with their fields.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

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
    shown = shown_handler(sys.stderr, os.environ)
    logging.basicConfig(level=settings.log.level.upper(), format=_FORMAT, handlers=[file, shown])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shown_handler(stream: TextIO, variables: Mapping[str, str]) -> logging.Handler:
    """A handler for the journal if ``stream`` leads there, else for the stream itself."""
    if not is_journal(stream.fileno(), variables):
        return logging.StreamHandler(stream)
    handler = JournalHandler()
    handler.setFormatter(logging.Formatter())  # the time and so on are in its fields
    return handler
