"""Host memory that a device's driver has pinned, and copies of other host memory.

A driver pins memory by registering ranges, and may refuse: under a limit of locked memory, or under
WSL. Copies of memory that is not pinned pass through small pinned buffers.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from gpupoold.memory import libc
from gpupoold.memory.device import Copy, CopyStream, Direction, Unpinned, cut

# A registration holds driver locks, which all processes share, for 0.1 s per GB, and launches of
# kernels wait meanwhile: 6 ms for a piece. The cost of more calls is negligible. (vllm#42632 and
# TensorRT-LLM#17773 register in pieces too. 512 GiB in one call fails with any driver from R580 on,
# and more than 2 GiB with kernels 6.11 to 6.13.)
PIN_BYTES = 64 << 20

# Beside live requests a piece is pinned in each interval, otherwise piece after piece, with a pause
# in which others have a turn who wait for a lock. Memory is unpinned because somebody needs it:
# beside live requests at most a fifth of the time goes to these calls.
_LIVE_INTERVAL_S = 0.25
_PAUSE_S = 0.001
_UNPIN_PAUSES = 4

# Buffers of a copy stream: two batches are under way, and one is being written.
_NUM_BUFFERS = 3
_MAX_THREADS = 4

_logger = logging.getLogger(__name__)


class HostDriver(Protocol):
    """The calls of a driver that pin host memory; a refusal is a ``RuntimeError``."""

    def bind_thread(self) -> None:
        """Prepare the calling thread for the other calls."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host`` of the same address."""


class IdleLock:
    """A lock that workers with live requests share, and that is held alone to pin a piece.

    All workers of a machine lock one file; without a file the lock is this process's.
    """

    def __init__(self, path: Path | None = None) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        # A lock belongs to an opened file: the pinning thread has another than the turn loop.
        self._fds = [] if path is None else [os.open(path, flags, 0o600) for _ in range(2)]
        self._is_live = False
        self._alone = threading.Lock()  # between threads of this process

    def set_live(self, is_live: bool) -> None:
        """Share the lock while requests are live; waits for a piece that is being pinned."""
        if is_live == self._is_live:
            return
        self._is_live = is_live
        if self._fds:
            fcntl.flock(self._fds[0], fcntl.LOCK_SH if is_live else fcntl.LOCK_UN)

    def try_alone(self) -> bool:
        """Take the lock alone unless another has the lock; ``release`` follows after True."""
        if self._is_live or not self._alone.acquire(blocking=False):
            return False
        if self._fds:
            try:
                fcntl.flock(self._fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._alone.release()
                return False
        return True

    def release(self) -> None:
        """Undo ``try_alone``."""
        if self._fds:
            fcntl.flock(self._fds[1], fcntl.LOCK_UN)
        self._alone.release()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class HostPart(NamedTuple):
    """A part of a host range, which is pinned as a whole or not at all."""

    offset: int
    num_bytes: int
    is_pinned: bool


@dataclass(eq=False, slots=True)
class _Range:
    address: int
    num_bytes: int
    last_use: int
    pinned_bytes: int = 0
    """Bytes from the start on that are registered."""
    is_wanted: bool = True
    """False if no further piece is to be pinned: the range is far, or is being unpinned."""

    @property
    def end(self) -> int:
        return self.address + self.num_bytes


class PinnedMemory:
    """The host ranges that one driver context pins, for any thread.

    A thread pins the ranges of ``pin_later``, the most recently used first, and before these unpins
    the ranges of ``unpin_later``.
    """

    def __init__(
        self,
        driver: HostDriver,
        idle: IdleLock | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.idle = idle or IdleLock()
        self._clock, self._sleep = clock, sleep
        self.numa_node = libc.NO_NODE
        """The node of memory for buffers."""
        self.stages_far = False
        """True if memory of other nodes is not to be pinned: copies through buffers are faster."""
        self.on_change: Callable[[], None] = lambda: None
        """Called by any thread when ``unpinned`` has changed."""
        self._driver = driver
        self._ranges: dict[int, _Range] = {}
        self._waiting: dict[int, _Range] = {}
        self._leaving: deque[tuple[_Range, Callable[[], None]]] = deque()
        # Sorted starts and ends; replaced as a whole, since ``split`` takes no lock.
        self._registrations: tuple[list[int], list[int]] = [], []
        self._uses = itertools.count(1)
        self._registering = threading.Lock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._problem = ""  # the driver's latest refusal; cleared when other memory is unpinned

    @property
    def unpinned(self) -> Unpinned:
        """What is not pinned of all ranges."""
        ranges = (held for held in list(self._ranges.values()) if held.is_wanted)
        missing = (held.num_bytes - held.pinned_bytes for held in ranges)
        return Unpinned(sum(missing), self._problem)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin a range, as far as the driver permits; the rest is tried again later."""
        held = self._hold(address, num_bytes)
        while held.pinned_bytes < num_bytes and self._pin_piece(held):
            self._sleep(_PAUSE_S)
        if held.pinned_bytes < num_bytes:
            self._wait_for_idleness(held)

    def pin_later(self, address: int, num_bytes: int) -> None:
        """Pin a range in pieces while no worker has live requests, and slowly beside these."""
        held = self._hold(address, num_bytes)
        if self.stages_far:
            node = libc.most_used_node(address, num_bytes)
            held.is_wanted = node in (libc.NO_NODE, self.numa_node)
        if held.is_wanted:
            self._wait_for_idleness(held)

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo a ``pin`` or ``pin_later`` of the same range; no copy may use the range.

        Raises ValueError: the range is another.
        """
        self._unpin(self._leaving_range(address, num_bytes))

    def unpin_later(self, address: int, num_bytes: int, then: Callable[[], None]) -> None:
        """Let the thread ``unpin`` a range, and then call ``then``, which may unmap the range."""
        held = self._leaving_range(address, num_bytes)
        self._start_thread(lambda: self._leaving.append((held, then)))

    def split(self, address: int, num_bytes: int) -> Iterator[HostPart]:
        """Yield the parts of a host range, each within one registration or outside of all.

        CUDA refuses a copy that touches two registrations, or one and other memory. An empty range
        yields nothing.
        """
        starts, ends = self._registrations
        at, end = address, address + num_bytes
        index = bisect_right(starts, at) - 1  # the last registration that begins at or before
        while at < end:
            is_pinned = index >= 0 and at < ends[index]
            after = starts[index + 1] if index + 1 < len(starts) else end
            stop = min(end, ends[index] if is_pinned else after)
            if not is_pinned:
                self._note_use(at)
            yield HostPart(at - address, stop - at, is_pinned)
            at = stop
            if at == after:
                index += 1

    def close(self) -> None:
        """End the thread and unpin all ranges."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        for held in list(self._ranges.values()):
            self.unpin(held.address, held.num_bytes)
        self.idle.close()

    def _hold(self, address: int, num_bytes: int) -> _Range:
        held = self._ranges[address] = _Range(address, num_bytes, -next(self._uses))
        self.on_change()
        return held

    def _leaving_range(self, address: int, num_bytes: int) -> _Range:
        held = self._ranges.get(address)
        if held is None or held.num_bytes != num_bytes:
            raise ValueError(f"{num_bytes} bytes at {address:#x} are not pinned")
        with self._registering:
            self._waiting.pop(address, None)
            held.is_wanted = False
        self.on_change()
        return held

    def _wait_for_idleness(self, held: _Range) -> None:
        self._start_thread(lambda: self._waiting.update({held.address: held}))

    def _start_thread(self, add: Callable[[], None]) -> None:
        with self._changed:
            add()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pinning", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        self._driver.bind_thread()
        while self._has_work():
            if self._leaving:
                held, then = self._leaving.popleft()
                try:
                    self._unpin(held)
                    then()
                except Exception:
                    _logger.exception("host memory cannot be unpinned, and stays mapped")
                continue
            waiting = list(self._waiting.values())
            if not waiting:
                continue
            held = max(waiting, key=lambda held: held.last_use)
            if self.idle.try_alone():
                try:
                    self._pin_piece(held)
                finally:
                    self.idle.release()
                self._sleep(_PAUSE_S)
            elif not self._is_needed_within(_LIVE_INTERVAL_S):
                self._pin_piece(held)

    def _has_work(self) -> bool:
        """Wait for a range to be unpinned or pinned; return False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._leaving or (self._waiting and not self._problem)
            )
            return bool(self._leaving) or not self._is_closed

    def _is_needed_within(self, seconds: float) -> bool:
        """Wait for more urgent work than to pin; return False after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_closed or bool(self._leaving), seconds)

    def _pin_piece(self, held: _Range) -> bool:
        """Register the next piece of a range; return False if the driver refuses."""
        with self._registering:
            if not held.is_wanted:
                return False
            start = held.address + held.pinned_bytes
            length = min(PIN_BYTES, held.end - start)
            with suppress(OSError):  # the driver tells the lack of memory
                libc.populate(start, length)  # CUDA would hold its locks meanwhile
            try:
                self._driver.register_host(start, length)
            except RuntimeError as error:
                text = "%s; copies of memory that is not pinned pass through buffers"
                _logger.warning(text, error)
                self._problem = str(error)
                return False
            held.pinned_bytes += length
            self.on_change()
            if held.pinned_bytes == held.num_bytes:
                self._waiting.pop(held.address, None)
            starts, ends = self._registrations
            at = bisect_left(starts, start)
            self._registrations = (
                [*starts[:at], start, *starts[at:]],
                [*ends[:at], start + length, *ends[at:]],
            )
            return True

    def _unpin(self, held: _Range) -> None:
        """Unregister the pieces of a range, with pauses in which others have the locks."""
        is_left = True
        while is_left:
            is_alone, started_s = self.idle.try_alone(), self._clock()
            try:
                is_left = self._unpin_piece(held)
            finally:
                if is_alone:
                    self.idle.release()
            took_s = self._clock() - started_s
            self._sleep(_PAUSE_S if is_alone else max(_PAUSE_S, _UNPIN_PAUSES * took_s))
        with self._changed:
            del self._ranges[held.address]
            self._problem = ""
            self._changed.notify()

    def _unpin_piece(self, held: _Range) -> bool:
        """Unregister the last piece of a range; return whether there may be another."""
        with self._registering:
            starts, ends = self._registrations
            last = bisect_left(starts, held.end) - 1
            if last < 0 or starts[last] < held.address:
                return False
            self._driver.unregister_host(starts[last])
            self._registrations = (
                starts[:last] + starts[last + 1 :],
                ends[:last] + ends[last + 1 :],
            )
            return starts[last] > held.address

    def _note_use(self, address: int) -> None:
        for held in list(self._waiting.values()):
            if held.address <= address < held.end:
                held.last_use = next(self._uses)


@dataclass(eq=False, slots=True)
class _Buffer:
    """A buffer in use by batches up to ``batch``, whose bytes then go to the host by ``after``."""

    address: int
    batch: int = 0
    after: list[Copy] = field(default_factory=list)


class StagedCopyStream:
    """A copy stream whose copies from and to unpinned memory pass through pinned buffers."""

    def __init__(
        self, own: CopyStream, direction: Direction, pinned: PinnedMemory, buffer_bytes: int
    ) -> None:
        self._own = own
        self._is_in = direction is Direction.IN
        self._pinned = pinned
        self._buffer_bytes = buffer_bytes
        self._memory = 0
        self._buffers: list[_Buffer] = []  # the next one to be used is the first
        self._threads: ThreadPoolExecutor | None = None

    def open_buffers(self) -> None:
        """Allocate and pin the buffers, now instead of at the first need."""
        num_bytes = _NUM_BUFFERS * self._buffer_bytes
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
        self._memory = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, flags, -1, 0)
        libc.prefer_node(self._memory, num_bytes, self._pinned.numa_node)
        self._pinned.pin(self._memory, num_bytes)
        self._buffers = [
            _Buffer(self._memory + index * self._buffer_bytes) for index in range(_NUM_BUFFERS)
        ]

    def fence(self) -> int:
        return self._own.fence()

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        direct: list[Copy] = []
        staged: list[Copy] = []
        for target, source, num_bytes in copies:
            host = source if self._is_in else target
            for offset, length, is_pinned in self._pinned.split(host, num_bytes):
                copy = Copy(target + offset, source + offset, length)
                (direct if is_pinned else staged).append(copy)
        batch = self._own.begin(direct, after) if direct or not staged else 0
        for part in cut(staged, self._buffer_bytes):
            batch = self._begin_staged(part, after)
        return batch

    def wait(self, batch: int) -> None:
        self._own.wait(batch)
        for buffer in self._buffers:
            if buffer.batch <= batch:
                self._empty(buffer)

    def close(self) -> None:
        self._own.close()
        for buffer in self._buffers:
            self._empty(buffer)
        if self._memory:
            num_bytes = _NUM_BUFFERS * self._buffer_bytes
            self._pinned.unpin(self._memory, num_bytes)
            libc.munmap(self._memory, num_bytes)
            self._memory, self._buffers = 0, []
        if self._threads is not None:
            self._threads.shutdown()

    def _begin_staged(self, copies: Sequence[Copy], after: int) -> int:
        """Start copies of unpinned memory, which fit into a buffer."""
        buffer = self._next_buffer()
        at, on_host, by_device = buffer.address, list[Copy](), list[Copy]()
        for target, source, num_bytes in copies:
            if self._is_in:
                on_host.append(Copy(at, source, num_bytes))
                by_device.append(Copy(target, at, num_bytes))
            else:
                by_device.append(Copy(at, source, num_bytes))
                on_host.append(Copy(target, at, num_bytes))
            at += num_bytes
        if self._is_in:
            self._copy(on_host)
        else:
            buffer.after = on_host
        buffer.batch = self._own.begin(by_device, after)
        return buffer.batch

    def _next_buffer(self) -> _Buffer:
        """Return the buffer whose last use is the longest ago, after this use."""
        if not self._memory:
            self._own.wait(self._own.begin([], 0))  # prepares this thread for calls of the driver
            self.open_buffers()
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.batch:
            self._own.wait(buffer.batch)
            self._empty(buffer)
        return buffer

    def _empty(self, buffer: _Buffer) -> None:
        after, buffer.after = buffer.after, []
        self._copy(after)

    def _copy(self, copies: Sequence[Copy]) -> None:
        num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 1)
        num_bytes = sum(copy.num_bytes for copy in copies)
        if num_threads < 2 or not num_bytes:
            _copy_each(copies)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(num_threads, "staging")
        for _ in self._threads.map(_copy_each, cut(copies, -(-num_bytes // num_threads))):
            pass


class StagedCopies:
    """Copies that have finished at the return of ``copy``, for any thread."""

    def __init__(self, open_copy_stream: Callable[[Direction], CopyStream]) -> None:
        self._open = open_copy_stream
        self._copy_streams: dict[Direction, CopyStream] = {}  # opened on first use
        self._lock = threading.Lock()

    def copy(self, direction: Direction, copy: Copy) -> None:
        with self._lock:
            if direction not in self._copy_streams:
                self._copy_streams[direction] = self._open(direction)
            copy_stream = self._copy_streams[direction]
            copy_stream.wait(copy_stream.begin([copy], 0))

    def close(self) -> None:
        for copy_stream in self._copy_streams.values():
            copy_stream.close()


def _copy_each(copies: Sequence[Copy]) -> None:
    for copy in copies:
        libc.memcpy(*copy)
