"""Ctrl-C while a program is loaded."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

INTERRUPTED = 130  # exit status of a process that Ctrl-C has ended


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """End the process at Ctrl-C without a traceback, while the context imports modules.

    Without effect in other threads than the main thread, the only one with handlers of signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
