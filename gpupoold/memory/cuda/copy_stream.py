"""Copies that overlap the engines' kernels: a CUDA stream per copy stream.

A batch of copies is one driver call if the driver supports batches: separate calls cost 4 us each,
which would limit blocks of 32 KiB to 8 GB/s. Inside a batch call, host-to-device copies below
28 KiB are slow too (7 GB/s; 44 GB/s above), so callers join adjacent pieces. One bad copy fails the
whole call, hence no copy is empty or crosses two registrations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpupoold.memory.contracts import Copy, Direction
from gpupoold.memory.cuda.driver import CudaDriver

# Drivers have crashed and hung on batches of 50,000 copies (vllm#49276). A batch of 32 MiB has at
# most 1,200 copies if each copy has at least 28 KiB.
_MAX_COPIES_PER_CALL = 1024
# The engines' small copies wait behind the present copy of the same copy engine: 0.07 ms.
_MAX_COPY_BYTES = 4 << 20


class CudaCopyStream:
    """A copy stream backed by a CUDA stream; every method raises ``CudaError``.

    ``split`` cuts a host range at the bounds of registrations. The turn loop's thread calls
    ``fence``, any thread ``close``, and the copy stream's thread all other methods.
    """

    def __init__(
        self,
        driver: CudaDriver,
        direction: Direction,
        compute_streams: Callable[[], Iterable[int]],
        split: Callable[[int, int], Iterable[tuple[int, int]]],
    ) -> None:
        self._driver = driver
        self._is_in = direction is Direction.IN
        self._compute_streams = compute_streams
        self._split = split
        self._is_bound = False
        self._can_batch = driver.can_copy_batches()
        self._stream = driver.create_stream()
        self._fence_events = _EventPool(driver.create_event)
        self._batch_events = _EventPool(driver.create_host_event)
        # Fences for which the stream does not wait yet: the turn loop's thread appends, the copy
        # stream's thread removes.
        self._fences: deque[tuple[int, list[int]]] = deque()
        self._num_fences = 0
        self._batches: deque[tuple[int, int]] = deque()  # not yet known to have finished
        self._num_batches = 0

    def fence(self) -> int:
        events = []
        for stream in self._compute_streams():
            events.append(self._fence_events.take())
            self._driver.record_event(events[-1], stream)
        self._num_fences += 1
        self._fences.append((self._num_fences, events))
        return self._num_fences

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        if not self._is_bound:
            self._driver.bind_thread()
            self._is_bound = True
        self._pass_fences(after)
        parts = [part for copy in copies for part in self._parts(copy)]
        if self._can_batch and len(parts) > 1:
            for first in range(0, len(parts), _MAX_COPIES_PER_CALL):
                self._driver.copy_batch(parts[first : first + _MAX_COPIES_PER_CALL], self._stream)
        else:
            copy_one = self._driver.copy_in if self._is_in else self._driver.copy_out
            for target, source, num_bytes in parts:
                copy_one(target, source, num_bytes, self._stream)
        event = self._batch_events.take()
        self._driver.record_event(event, self._stream)
        self._num_batches += 1
        self._batches.append((self._num_batches, event))
        return self._num_batches

    def wait(self, batch: int) -> None:
        assert batch <= self._num_batches, f"batch {batch} has not been begun"
        events = []
        while self._batches and self._batches[0][0] <= batch:
            events.append(self._batches.popleft()[1])
        if events:
            self._driver.synchronize_event(events[-1])  # a stream's work ends in order
            self._batch_events.give_back(events)

    def close(self) -> None:
        """Close the copy stream after waiting for all batches."""
        self._driver.bind_thread()
        self._driver.synchronize_stream(self._stream)
        fences = (event for _, events in self._fences for event in events)
        batches = (event for _, event in self._batches)
        pooled = (*self._fence_events.events, *self._batch_events.events)
        for event in (*fences, *batches, *pooled):
            self._driver.destroy_event(event)
        self._driver.destroy_stream(self._stream)

    def _pass_fences(self, last: int) -> None:
        """Make the stream wait for all fences up to ``last``.

        The engines' streams vary from fence to fence, so the last fence may not cover earlier ones.
        """
        assert last <= self._num_fences, f"there is no fence {last}"
        while self._fences and self._fences[0][0] <= last:
            _, events = self._fences.popleft()
            for event in events:
                self._driver.wait_event(self._stream, event)
            # The events can be reused: the stream waits for their state at the time of the call.
            self._fence_events.give_back(events)

    def _parts(self, copy: Copy) -> Iterator[Copy]:
        target, source, num_bytes = copy
        for offset, length in self._split(source if self._is_in else target, num_bytes):
            for at in range(offset, offset + length, _MAX_COPY_BYTES):
                part = min(_MAX_COPY_BYTES, offset + length - at)
                yield Copy(target + at, source + at, part)


class _EventPool:
    """A pool of reusable events, for two threads."""

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        self.events: deque[int] = deque()

    def take(self) -> int:
        try:
            return self.events.popleft()
        except IndexError:
            return self._create()

    def give_back(self, events: Iterable[int]) -> None:
        self.events.extend(events)
