"""Restarts of a supervised process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpupoold.control.processes.backoff import Backoff

_logger = logging.getLogger(__name__)


async def keep_running(
    name: str, run_once: Callable[[], Awaitable[bool]], backoff: Backoff | None = None
) -> None:
    """Call ``run_once`` for ever, with the waits of ``backoff``, by default a new one.

    ``run_once`` returns after the process's end, with True if the end is excused, see
    :meth:`Backoff.after`. ``run_once`` raises OSError if the process could not be started.
    """
    backoff = backoff or Backoff()
    while True:
        started_s = time.monotonic()
        is_excused = False
        try:
            is_excused = await run_once()
        except OSError as error:
            _logger.error("%s could not be started: %s", name, error)
        except Exception:
            _logger.exception("following %s failed", name)
        wait_s = backoff.after(time.monotonic() - started_s, is_excused=is_excused)
        _logger.info("%s restarts in %g s", name, wait_s)
        await asyncio.sleep(wait_s)
