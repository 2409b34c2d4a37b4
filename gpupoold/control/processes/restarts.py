"""Restarts of a supervised process, and the waits before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_logger = logging.getLogger(__name__)

FIRST_S = 1.0
MAX_S = 60.0
STABLE_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The monotonic clock in seconds, and the wait for a number of seconds."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL_TIME = Timing()


class Backoff:
    """The backoff of one process. Pure.

    A process that ran for ``STABLE_AFTER_S`` restarts at once; repeated short runs double the wait
    up to ``max_s``.
    """

    def __init__(self, max_s: float = MAX_S) -> None:
        self._max_s = max_s
        self._next_s = 0.0

    def after(self, ran_s: float, *, is_excused: bool = False) -> float:
        """Return the seconds to wait after a run of ``ran_s``.

        After an excused end no wait is needed.
        """
        if is_excused:
            return 0.0
        if ran_s >= STABLE_AFTER_S:
            self._next_s = 0.0
        wait_s = self._next_s
        self._next_s = min(max(FIRST_S, 2 * wait_s), self._max_s)
        return wait_s


async def keep_running(
    name: str, run_once: Callable[[], Awaitable[bool]], backoff: Backoff, timing: Timing
) -> None:
    """Call ``run_once`` repeatedly, with the waits of ``backoff``; never returns.

    ``run_once`` returns after the process's end, with True if the end is excused, see
    :meth:`Backoff.after`. ``run_once`` raises OSError if the process could not be started.
    """
    while True:
        started_s = timing.clock()
        is_excused = False
        try:
            is_excused = await run_once()
        except OSError as error:
            _logger.error("%s could not be started: %s", name, error)
        except Exception:
            _logger.exception("the supervision of %s failed", name)
        wait_s = backoff.after(timing.clock() - started_s, is_excused=is_excused)
        _logger.info("%s restarts in %g s", name, wait_s)
        await timing.sleep(wait_s)
