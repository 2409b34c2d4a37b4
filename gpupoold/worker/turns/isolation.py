"""Waiting, before the addition of a request that may crash the worker, for idle threads.

See :mod:`gpupoold.control.requests.suspects`. The scheduler isolates the requests' steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ALONE_S, GRAMMAR_S = 1.0, 5.0
"""Seconds to wait for other threads to be idle, and for the request's grammar.

Other requests of the worker wait meanwhile.
"""
_POLL_S = 0.001


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Return True when the condition holds, False after ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True
