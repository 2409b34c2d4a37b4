"""Where the daemon's own log goes: a file in ``paths.log_dir``, and standard error."""

from __future__ import annotations

import logging
import sys

from gpupoold.config import Settings
from gpupoold.errors import Failed

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
    logging.basicConfig(
        level=settings.log.level.upper(),
        format=_FORMAT,
        handlers=[file, logging.StreamHandler(sys.stderr)],
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
