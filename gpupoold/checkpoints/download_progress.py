"""The progress of a download: bytes, and the rate of the last seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

ProgressCallback = Callable[[int, int, float | None], None]
"""Called with the bytes that are here, the bytes in total, and the bytes per second.

The rate is None before the first seconds of a transfer.
"""

REPORT_INTERVAL_S = 0.1
_RATE_WINDOW_S = 10.0
_MIN_RATE_S = 0.5


class DownloadProgress:
    """Downloaded bytes, shared by the threads; reports at most every ``REPORT_INTERVAL_S``."""

    def __init__(
        self,
        total_bytes: int,
        report: ProgressCallback,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds."""
        self._total_bytes = total_bytes
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._received_bytes = 0
        self._next_report_at = 0.0
        self._samples: deque[tuple[float, int]] = deque()

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
        now = self._clock()
        if now >= self._next_report_at or self._done_bytes == self._total_bytes:
            self._next_report_at = now + REPORT_INTERVAL_S
            self._report(self._done_bytes, self._total_bytes, self._rate(now))

    def _rate(self, now: float) -> float | None:
        samples = self._samples
        samples.append((now, self._received_bytes))
        while len(samples) > 2 and samples[1][0] < now - _RATE_WINDOW_S:
            samples.popleft()
        since, before_bytes = samples[0]
        if now - since < _MIN_RATE_S:
            return None
        return (self._received_bytes - before_bytes) / (now - since)
