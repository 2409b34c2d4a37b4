"""Set-up of the daemon's log: a file in ``paths.log_dir``, and standard error.

If standard error is systemd's journal, records go to the journal with fields. The file is written
in both cases: ``gpupool logs`` reads the file, and the daemon's user may be unable to read the
journal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from gpupoold.config.schema import Settings
from gpupoold.errors import Failed
from gpupoold.logs.files import rotating_handler
from gpupoold.logs.journal import JournalHandler, is_journal
from gpupoold.logs.limits import LogLimit
from gpupoold.printable import LineFormatter

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_logging(settings: Settings) -> None:
    """Set the root logger up, once per process.

    Raises:
        Failed: the log file cannot be written.
    """
    try:
        file = rotating_handler(settings.paths.log_dir / "gpupoold.log")
    except OSError as error:
        raise Failed(
            f"{settings.paths.log_dir}: cannot be written: {error.strerror}",
            "change paths.log_dir or its permissions",
        ) from error
    shown = shown_handler(sys.stderr, os.environ)
    limit = LogLimit()
    for handler in (file, shown):
        handler.addFilter(limit)
        if handler.formatter is None:
            handler.setFormatter(LineFormatter(_FORMAT))
    logging.basicConfig(level=settings.log.level.upper(), handlers=[file, shown])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shown_handler(stream: TextIO, variables: Mapping[str, str]) -> logging.Handler:
    """Return a handler for the journal if ``stream`` is connected to the journal, else for
    ``stream``.
    """
    if not is_journal(stream.fileno(), variables):
        return logging.StreamHandler(stream)
    handler = JournalHandler()
    handler.setFormatter(LineFormatter())  # the time and level are in fields
    return handler
