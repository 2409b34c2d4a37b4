"""A thread for slow device calls that would block the turn loop.

On a GPU, pinning host memory takes 0.1 s per GB, and unpinning takes time too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gpupoold.memory.contracts import Device, Direction

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DeviceThread:
    """One thread that runs jobs in order; jobs may call ``pin`` and ``unpin`` of a device."""

    def __init__(self, device: Device, name: str) -> None:
        self._copy_stream = stream = device.open_copy_stream(Direction.IN)
        # An empty batch makes the device's context current in the thread.
        self._thread = ThreadPoolExecutor(1, name, lambda: stream.wait(stream.begin([], 0)))

    def submit(self, job: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run ``job`` after all earlier jobs; return its future result."""
        return self._thread.submit(job, *args, **kwargs)

    def close(self) -> None:
        """Wait for all jobs, then end the thread."""
        self._thread.shutdown()
        self._copy_stream.close()
