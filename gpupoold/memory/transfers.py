"""Copies that overlap the engines' work, within a worker and from one worker to another.

A transfer is a list of copies, made in consecutive batches. Two batches are queued at a time, also
of two transfers, so that the link never waits for the thread. A transfer can be stopped within two
batches' time (about a millisecond), and the part that has arrived is usable. A batch is large
enough for full bandwidth although each batch waits for the interpreter, which the engines keep
busy: see :attr:`Device.copy_batch_bytes`.

Three rules keep bytes correct (Aegaeon, section 5.3):

- compute waits for KV: the owner of a transfer runs no step that needs the KV before ``has_ended``;
- a transfer waits for the previous transfer of the same bytes: the owner waits for a transfer, or
  stops the transfer, before moving the bytes again;
- memory of a running copy has no other user: the owner keeps the memory until the transfer's end.

The host caches of all workers of a machine are shared memory: each worker maps the caches of the
other workers. A *KV transfer* is a slot of one of the caches, for another worker to read. The
sender keeps the slot until the receiver reports that the slot is no longer needed, or the receiver
has ended. An eventfd signals the arrival of the bytes, so that no worker waits for a busy process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

from gpupoold.memory.device import Copy, CopyStream, Device, Direction, cut
from gpupoold.memory.host import lay
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.system.activity import WORKER, ThreadPhase

_P = ParamSpec("_P")
_T = TypeVar("_T")

BATCH_BYTES = 8 << 20
_MAX_UNDER_WAY = 2
# Batches that may wait in a queue before owners hold further transfers back: some milliseconds of
# the link. Plans change, and a transfer that is not in the queue need not be stopped.
_MAX_WAITING_BATCHES = 16

_logger = logging.getLogger(__name__)

_ARRIVED, _FAILED = 1, 2


@dataclass(eq=False, slots=True)
class Transfer:
    """Copies in progress, for which the requesting thread waits, or which the thread stops.

    The copying thread calls ``on_end`` with True if all bytes have arrived, else False, before
    ``has_ended``. There is no call for a transfer stopped before its start.
    """

    copies: Sequence[Copy]
    batch_bytes: int
    after: int
    help_queue: Callable[[], bool]
    on_end: Callable[[bool], None] | None = None
    num_bytes: int = field(init=False)
    num_copied_bytes: int = field(default=0, init=False)
    """Bytes from the start on that have arrived."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _has_begun: bool = field(default=False, init=False)
    _is_stopped: bool = field(default=False, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _progress: threading.Condition = field(default_factory=threading.Condition, init=False)

    def __post_init__(self) -> None:
        self.num_bytes = sum(copy.num_bytes for copy in self.copies)

    @property
    def has_ended(self) -> bool:
        """True if no copy is running; ``wait`` then returns at once."""
        return self._ended.is_set()

    def wait_for(self, num_bytes: int) -> None:
        """Return when the first ``num_bytes`` have arrived, unlike ``wait`` without making copies.

        Raises Exception: the failure of a copy before.
        """
        with self._progress:
            self._progress.wait_for(lambda: self.num_copied_bytes >= num_bytes or self.has_ended)
        if self.num_copied_bytes < num_bytes:
            self.wait()  # raises the failure
            raise AssertionError("a stopped transfer is waited for")

    def wait(self) -> None:
        """Return when every byte has arrived.

        Raises Exception: the failure of a copy.
        """
        while not self.has_ended:
            if not self.help_queue():
                break
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Start no further batch; ``stop`` waits for running ones."""
        with self._lock:
            self._is_stopped = True
            if not self._has_begun:
                self._ended.set()

    def stop(self) -> int:
        """End the transfer early; return the bytes from the start on that have arrived.

        No byte is written after the return. Never raises: bytes of a failed copy have not arrived.
        """
        self.cancel()
        self._ended.wait()
        return self.num_copied_bytes

    def start(self) -> bool:
        """Return whether to make the copies: False if stopped before; for the queue's threads."""
        with self._lock:
            self._has_begun = not self._is_stopped
            return self._has_begun

    def batches(self) -> Iterator[list[Copy]]:
        """Yield the copies in batches until the transfer is stopped; for the queue's threads."""
        for batch in cut(self.copies, self.batch_bytes):
            if self._is_stopped:
                return
            yield batch

    def note_arrival(self, num_bytes: int) -> None:
        """Count a batch that has arrived; for the queue's threads."""
        with self._progress:
            self.num_copied_bytes += num_bytes
            self._progress.notify_all()

    def note_failure(self, error: BaseException) -> None:
        """Keep the first failure of a copy, for ``wait``; for the queue's threads."""
        self._error = self._error or error

    def end(self) -> None:
        """Say that no copy is running any more; for the queue's threads."""
        try:
            if self.on_end is not None:
                self.on_end(self._error is None and self.num_copied_bytes == self.num_bytes)
        finally:  # last: after has_ended the owner may free what on_end uses
            with self._progress:
                self._ended.set()
                self._progress.notify_all()


class _Batches:
    """Batches on one copy stream, at most two under way, for one thread.

    A transfer ends when its last batch has arrived, also after an error or a stop, so that no write
    follows the end.
    """

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
        self._under_way: deque[tuple[Transfer, int, int]] = deque()
        self._beginning: Transfer | None = None

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def begin(self, transfer: Transfer) -> None:
        """Begin all batches of a transfer, unless stopped; the last may still be under way."""
        if not transfer.start():
            return
        self._beginning = transfer
        for batch in transfer.batches():
            try:
                number = self._copy_stream.begin(batch, transfer.after)
            except BaseException as error:  # raised by wait()
                transfer.note_failure(error)
                break
            num_bytes = sum(copy.num_bytes for copy in batch)
            self._under_way.append((transfer, number, num_bytes))
            if len(self._under_way) == _MAX_UNDER_WAY:
                self.finish_oldest()
        self._beginning = None
        self._end_if_done(transfer)

    def finish_oldest(self) -> None:
        """Wait for the oldest batch."""
        transfer, number, num_bytes = self._under_way.popleft()
        try:
            self._copy_stream.wait(number)
        except BaseException as error:
            transfer.note_failure(error)
        else:
            transfer.note_arrival(num_bytes)
        self._end_if_done(transfer)

    def finish(self) -> None:
        """Wait for all batches; a transfer that was being begun ends with the part that arrived."""
        unfinished, self._beginning = self._beginning, None
        if unfinished is not None and not self._under_way:
            unfinished.end()
        while self._under_way:
            self.finish_oldest()

    def _end_if_done(self, transfer: Transfer) -> None:
        is_under_way = any(other is transfer for other, _, _ in self._under_way)
        if transfer is not self._beginning and not is_under_way:
            transfer.end()


class TransferQueue:
    """Transfers in one direction, started in the order of the requests.

    Each copy stream has a thread, so as many transfers run at a time as there are copy streams.
    """

    @classmethod
    def open(cls, device: Device, direction: Direction, name: str) -> TransferQueue:
        """Open a queue over copy streams of ``device``.

        If the host's cores make the copies, a thread that waits for a transfer helps.
        """
        helper = None if device.has_link else device.open_copy_stream(direction)
        streams = device.open_copy_streams(direction)
        return cls(streams, name, device.copy_batch_bytes, helper=helper)

    def __init__(
        self,
        copy_streams: Sequence[CopyStream],
        name: str,
        batch_bytes: int = BATCH_BYTES,
        *,
        helper: CopyStream | None = None,
    ) -> None:
        """Start the threads, one per copy stream, with ``name`` in their names.

        ``batch_bytes`` are copied at a time. ``helper`` is a copy stream for the thread that waits
        for a transfer, which meanwhile makes copies that have not started: a sleeping thread would
        leave a core idle, and a thread that wakes up on the core of another copy waits some
        milliseconds to be moved.
        """
        self._copy_streams = copy_streams
        self._helper = helper
        self._batch_bytes = batch_bytes
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._waiting: list[Transfer] = []
        self._threads = [
            threading.Thread(target=self._run, args=(copy_stream,), name=name, daemon=True)
            for copy_stream in copy_streams
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_room(self) -> bool:
        """True if another transfer would soon start; owners hold transfers back otherwise."""
        return self.room_bytes > 0

    @property
    def room_bytes(self) -> int:
        """Bytes that may still be queued before owners hold further transfers back."""
        self._forget_ended()
        waiting_bytes = _MAX_WAITING_BATCHES * self._batch_bytes
        return waiting_bytes - sum(transfer.num_bytes for transfer in self._waiting)

    def begin(
        self, copies: Sequence[Copy], on_end: Callable[[bool], None] | None = None
    ) -> Transfer:
        """Start copies after earlier transfers and after the engines' launched kernels.

        See :class:`Transfer` for ``on_end``.
        """
        after = self._copy_streams[0].fence()
        transfer = Transfer(copies, self._batch_bytes, after, self._help, on_end)
        self._forget_ended()
        self._waiting.append(transfer)
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """Finish all transfers, then end the threads and the copy streams."""
        for _ in self._threads:
            self._queue.put(None)
        for thread, copy_stream in zip(self._threads, self._copy_streams, strict=True):
            thread.join()
            copy_stream.close()
        if self._helper is not None:
            self._helper.close()

    def _forget_ended(self) -> None:
        self._waiting = [transfer for transfer in self._waiting if not transfer.has_ended]

    def _help(self) -> bool:
        """Make the next queued transfer in the calling thread; return False if there is none."""
        if self._helper is None:
            return False
        try:
            transfer = self._queue.get_nowait()
        except Empty:
            return False
        if transfer is None:  # the signal of close() to a thread
            self._queue.put(None)
            return False
        batches = _Batches(self._helper)
        batches.begin(transfer)
        batches.finish()
        return True

    def _run(self, copy_stream: CopyStream) -> None:
        batches = _Batches(copy_stream)
        try:
            while (transfer := self._queue.get()) is not None:
                with WORKER.beside(ThreadPhase.COPY):
                    self._make(transfer, batches)
        finally:
            batches.finish()  # after an error of on_end of another transfer

    def _make(self, transfer: Transfer, batches: _Batches) -> None:
        """Make the copies of a transfer, and of those that are queued meanwhile."""
        batches.begin(transfer)
        while batches.num_under_way:
            if (following := self._following()) is not None:
                batches.begin(following)
            else:
                batches.finish_oldest()

    def _following(self) -> Transfer | None:
        """Return the next transfer, if its copies can be queued behind copies under way.

        Cores that make copies have made these when a batch has begun.
        """
        if self._helper is not None:
            return None
        try:
            transfer = self._queue.get_nowait()
        except Empty:
            return None
        if transfer is None:  # the signal of close()
            self._queue.put(None)
        return transfer


class DeviceThread:
    """One thread that runs jobs in order; jobs may call ``unpin`` of a device.

    For slow calls that would block the turn loop: on a GPU, unpinning host memory takes time.
    """

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


class Arrival:
    """One end of an eventfd that signals to another process whether bytes have arrived."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if fd is None else fd
        self._state = 0

    def signal(self, has_arrived: bool) -> None:
        """Signal that all bytes have arrived, or never will; callable by any thread."""
        os.eventfd_write(self.fd, _ARRIVED if has_arrived else _FAILED)

    def is_signalled(self) -> bool:
        """Return whether the other end has signalled."""
        if not self._state:
            with contextlib.suppress(BlockingIOError):
                self._state = os.eventfd_read(self.fd)
        return self._state != 0

    def has_arrived(self) -> bool:
        return self.is_signalled() and self._state == _ARRIVED

    def close(self) -> None:
        os.close(self.fd)


class PeerCache:
    """The host cache of another worker, mapped while any slot in the cache is in use.

    The cache is pinned in idle moments. If the device is a group, a thread first maps the cache for
    the other ranks; the cache is not usable before.
    """

    def __init__(self, fd: int, num_bytes: int, device: Device, thread: DeviceThread) -> None:
        """Map ``num_bytes`` of ``fd``, owned by this object from now on.

        Raises OSError: the process has too few addresses.
        """
        self._buffer = HostBuffer(fd, num_bytes // device.num_ranks, is_populated=False)
        self._device = device
        self._thread = thread
        self._num_users = 1
        self.is_usable = device.num_ranks == 1
        """True if all ranks of the device can copy from the cache."""
        device.pin_later(self._buffer.address, self._buffer.num_bytes)
        if not self.is_usable:
            thread.submit(self._share)

    def slot(self, offsets: Sequence[tuple[int, int]], on_free: Callable[[], None]) -> PeerSlot:
        """Return the slot at ``offsets``, a list of ``(offset, num_bytes)``, in a usable cache."""
        self._num_users += 1
        pieces = [(self._buffer.address + offset, num_bytes) for offset, num_bytes in offsets]
        return PeerSlot(self, pieces, on_free)

    def leave(self) -> None:
        """Remove one user, a slot or the creator; unmap the cache after the last."""
        self._num_users -= 1
        if not self._num_users:
            self._thread.submit(self._unmap)

    def _share(self) -> None:
        if not self._num_users:
            return  # the last user left before this job started
        try:
            self._device.share_host(self._buffer.address, self._buffer.num_bytes, self._buffer.fd)
        except Exception as error:  # affects only KV transfers from that cache
            _logger.error(
                "another worker's KV host cache cannot be mapped: %s; requests that migrate from "
                "that worker recompute their KV",
                error,
            )
            return
        self.is_usable = True

    def _unmap(self) -> None:
        buffer = self._buffer
        self._device.unpin_later(buffer.address, buffer.num_bytes, buffer.close)


@dataclass(eq=False, slots=True)
class PeerSlot:
    """The place of some blocks' KV in another worker's host cache."""

    cache: PeerCache
    pieces: list[tuple[int, int]]
    on_free: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.pieces)

    def beside(self, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        return lay(extents, self.pieces)

    def free(self) -> None:
        """Report that this worker no longer needs the slot."""
        self.cache.leave()
        self.on_free()
