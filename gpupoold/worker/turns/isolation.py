"""Requests that may crash the worker are added while nothing else can, see
:mod:`gpupoold.control.requests.suspects`. Their steps are made alone by the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ALONE_S, GRAMMAR_S = 1.0, 5.0
"""How long a request that is added alone waits for other threads to come to rest, and for its
grammar. Other requests of the worker wait meanwhile."""
_POLL_S = 0.001


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Return when the condition holds, or False when it does not within ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
