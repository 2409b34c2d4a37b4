"""The progress of a download: bytes, and the rate of the last seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

ProgressCallback = Callable[[int, int, float | None], None]
"""Called with the bytes that are here, the bytes in total, and the bytes per second.

The rate is None before the first seconds of a transfer.
"""

REPORT_INTERVAL_S = 0.1
_RATE_WINDOW_S = 10.0
_MIN_RATE_S = 0.5


@dataclass(eq=False)
class DownloadProgress:
    """Downloaded bytes, shared by the threads; reports at most every ``REPORT_INTERVAL_S``.

    ``clock`` returns seconds.
    """

    total_bytes: int
    report: ProgressCallback
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _done_bytes: int = field(default=0, init=False)
    _received_bytes: int = field(default=0, init=False)
    _next_report_at: float = field(default=0.0, init=False)
    _samples: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def found(self, num_bytes: int) -> None:
        """Count bytes of an earlier transfer; a negative number for bytes that were dropped."""
        with self._lock:
            self._done_bytes += num_bytes
            self._tell()

    def received(self, num_bytes: int) -> None:
        """Count bytes that have just arrived."""
        with self._lock:
            self._done_bytes += num_bytes
            self._received_bytes += num_bytes
            self._tell()

    def _tell(self) -> None:
        now = self.clock()
        if now >= self._next_report_at or self._done_bytes == self.total_bytes:
            self._next_report_at = now + REPORT_INTERVAL_S
            self.report(self._done_bytes, self.total_bytes, self._rate(now))

    def _rate(self, now: float) -> float | None:
        samples = self._samples
        samples.append((now, self._received_bytes))
        while len(samples) > 2 and samples[1][0] < now - _RATE_WINDOW_S:
            samples.popleft()
        since, before_bytes = samples[0]
        if now - since < _MIN_RATE_S:
            return None
        return (self._received_bytes - before_bytes) / (now - since)
