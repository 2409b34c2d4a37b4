"""A moment of the engines' streams on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpupoold.memory.cuda.driver import CudaDriver


class CudaFence:
    """Events on all compute streams; every method raises ``CudaError``. For one thread."""

    def __init__(self, driver: CudaDriver, compute_streams: Callable[[], Iterable[int]]) -> None:
        self._driver = driver
        self._compute_streams = compute_streams
        self._events: list[int] = []
        self._num_recorded = 0

    def record(self) -> None:
        self._num_recorded = 0
        for stream in self._compute_streams():
            if self._num_recorded == len(self._events):
                self._events.append(self._driver.create_host_event())
            self._driver.record_event(self._events[self._num_recorded], stream)
            self._num_recorded += 1

    def wait(self) -> None:
        for event in self._events[: self._num_recorded]:
            self._driver.synchronize_event(event)
        self._num_recorded = 0  # the moment has passed

    def close(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        self._events.clear()
        self._num_recorded = 0
