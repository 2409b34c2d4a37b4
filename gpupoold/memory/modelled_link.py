"""The link of an emulated device: copies take as long as over a link of a given bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from gpupoold.memory import libc
from gpupoold.memory.contracts import Copy


class ModelledLink:
    """One direction of a link between host and device, shared by all threads.

    Bytes are copied at once by the calling thread, and count as arrived when the link would have
    transferred these and all earlier bytes.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def begin(self, copies: Sequence[Copy]) -> float:
        """Make the copies; return the time of their arrival."""
        began_s = self._clock()
        for target, source, num_bytes in copies:
            libc.memcpy(target, source, num_bytes)
        num_bytes = sum(copy.num_bytes for copy in copies)
        with self._lock:
            self._free_at_s = max(self._free_at_s, began_s) + num_bytes / self._bytes_per_s
            return self._free_at_s

    def wait_until(self, arrival_s: float) -> None:
        """Return at the time of an arrival."""
        while (left_s := arrival_s - self._clock()) > 0:
            self._sleep(left_s)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy, and return at the time of the arrival."""
        self.wait_until(self.begin([Copy(target, source, num_bytes)]))


class LinkCopyStream:
    """A copy stream over a :class:`ModelledLink`."""

    def __init__(self, link: ModelledLink) -> None:
        self._link = link
        self._numbers = count(1)
        self._arrivals_s: dict[int, float] = {}

    def fence(self) -> int:
        """Return at once: kernels on the CPU are synchronous."""
        return 0

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        number = next(self._numbers)
        self._arrivals_s[number] = self._link.begin(copies)
        return number

    def wait(self, batch: int) -> None:
        arrived = [number for number in self._arrivals_s if number <= batch]
        self._link.wait_until(max((self._arrivals_s.pop(one) for one in arrived), default=0.0))

    def close(self) -> None:
        """Return when all copies have arrived."""
        self.wait(next(self._numbers))
