"""Full garbage collections of a frontend, at times when they are short.

A collection walks all objects and stops the event loop: 0.4 s while the answers with 100,000
log-probabilities are made. Such objects form no cycles, and go when the answer has been sent.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from gpupoold.frontend.in_flight import BytesInFlight
from gpupoold.system.process import trim_heap

_NEVER = 1_000_000_000
_THRESHOLDS = (2_000, 10, _NEVER)
"""The collector's own collections walk up to 20,000 objects, 10 to 20 ms."""
_INTERVAL_S = 1.0
_FEW_BYTES = 4 << 20
_WITH_FEW_AFTER_S = 60.0
_ALWAYS_AFTER_S = 600.0


class Collector:
    """Collects garbage soon after the last request, or beside small ones from time to time.

    ``in_flight`` tells how much memory the present requests may have. ``clock`` returns seconds.
    """

    def __init__(
        self, in_flight: BytesInFlight, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._last_s = clock()
        self._has_garbage = False

    def note_garbage(self) -> None:
        """Record that large cycles of objects are unused: a model's API, which has some MB."""
        self._has_garbage = True

    async def run(self) -> None:
        """Collect for ever, in place of full collections by the interpreter."""
        gc.set_threshold(*_THRESHOLDS)
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self.is_due():
                gc.collect()
                await asyncio.to_thread(trim_heap)

    def is_due(self) -> bool:
        """Return whether to collect now; to be called regularly."""
        now_s, num_bytes = self._clock(), self._in_flight.num_bytes
        past_s = now_s - self._last_s
        if num_bytes:
            self._has_garbage = True
            after_s = _WITH_FEW_AFTER_S if num_bytes <= _FEW_BYTES else _ALWAYS_AFTER_S
            is_due = past_s >= after_s
        else:
            is_due, self._has_garbage = self._has_garbage, False
        if is_due:
            self._last_s = now_s
        return is_due
