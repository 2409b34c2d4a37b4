"""Host memory registered with CUDA for full-speed copies."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from gpupoold.memory.cuda.driver import CudaDriver, CudaError

# A registration holds driver locks, which all processes share, for 0.1 s per GB. Registering a KV
# cache of 500 GB in one call would stop every kernel launch on the machine for a minute. Between
# pieces other processes get the locks every 0.1 s, and the cost of more calls is negligible.
# (vllm#42632 and TensorRT-LLM#17773 register in pieces too. 512 GiB in one call fails with any
# driver from R580 on, and more than 2 GiB with kernels 6.11 to 6.13.)
_PIECE_BYTES = 1 << 30


class PinnedMemory:
    """The registered ranges of one device's context, for any thread."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._ends: dict[int, int] = {}  # start → end of each registration
        self._bounds: list[int] = []  # sorted; replaced as a whole: ``split`` takes no lock
        self._lock = threading.Lock()

    def pin(self, address: int, num_bytes: int) -> None:
        """Register a range. Its pages should exist: CUDA creates missing pages with one thread.

        Raises:
            CudaError: the driver refused; nothing is registered.
        """
        end = address + num_bytes
        done: dict[int, int] = {}
        try:
            for start in range(address, end, _PIECE_BYTES):
                length = min(_PIECE_BYTES, end - start)
                self._driver.register_host(start, length)
                done[start] = start + length
        except CudaError:
            for start in done:
                self._driver.unregister_host(start)
            raise
        with self._lock:
            self._ends |= done
            self._note_bounds()

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo a ``pin`` of the same range; no copy may use the range.

        Raises:
            ValueError: the range was not pinned as a whole.
        """
        starts = range(address, address + num_bytes, _PIECE_BYTES)
        if any(start not in self._ends for start in starts):
            raise ValueError(f"{num_bytes} bytes at {address:#x} are not pinned")
        for start in starts:
            self._driver.unregister_host(start)
        with self._lock:
            for start in starts:
                del self._ends[start]
            self._note_bounds()

    def split(self, address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield ``(offset, num_bytes)`` of parts of a host range, each within one registration.

        CUDA refuses a copy that touches two registrations, or one and other memory. An empty range
        yields nothing.
        """
        end = address + num_bytes
        bounds = self._bounds
        inner = bounds[bisect_right(bounds, address) : bisect_left(bounds, end)]
        start = address
        for bound in (*inner, end):
            if bound > start:
                yield start - address, bound - start
            start = bound

    def close(self) -> None:
        for start in self._ends:
            self._driver.unregister_host(start)
        self._ends.clear()
        self._note_bounds()

    def _note_bounds(self) -> None:
        self._bounds = sorted({*self._ends, *self._ends.values()})
