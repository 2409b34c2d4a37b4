"""Ctrl-C while a program is loaded."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit status of a process that Ctrl-C has ended."""


@contextlib.contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """End the process at Ctrl-C without a traceback, while the context imports modules."""
    before = signal.signal(signal.SIGINT, _end)
    yield
    signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
