"""A CUDA driver that measures the duration of each kind of call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from gpupoold.memory.cuda.driver import CudaDriver


class TimedDriver:
    """Passes every call on to ``driver``. ``clock`` counts seconds."""

    def __init__(self, driver: CudaDriver, clock: Callable[[], float] = time.perf_counter) -> None:
        self._driver = driver
        self._clock = clock
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def taken_s(self, name: str) -> list[float]:
        """What the calls of this name have taken since they were last asked for."""
        return self._seconds.pop(name, [])

    def forget(self) -> None:
        """What has been noted up to now does not count."""
        self._seconds.clear()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._driver, name)

        def timed(*arguments: Any) -> Any:
            started_s = self._clock()
            try:
                return call(*arguments)
            finally:
                self._seconds[name].append(self._clock() - started_s)

        return timed
