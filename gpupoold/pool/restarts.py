"""A supervised process is started again whenever it has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpupoold.pool.backoff import Backoff

_logger = logging.getLogger(__name__)


async def keep_running(name: str, run_once: Callable[[], Awaitable[bool]]) -> None:
    """Run it again and again, with the waits of :class:`Backoff`.

    ``run_once`` returns when the process has ended: whether it had come up, and somebody else
    ended it. It raises OSError when the process could not be started.
    """
    backoff = Backoff()
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
