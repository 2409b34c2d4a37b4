"""Copies beside the engine's work: a thread that makes them one behind the other.

A transfer is made in chunks, so that it can be stopped within a chunk's time (for 8 MiB
about a millisecond) and what has arrived until then is of use. A chunk is large enough for
full bandwidth: links are full from 1 to 4 MiB on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

CHUNK_BYTES = 8 << 20


class Copy(NamedTuple):
    """``num_bytes`` from host address ``source`` to device address ``target``."""

    target: int
    source: int
    num_bytes: int


# Makes a copy and returns when it is made; called from one thread.
MakeCopy = Callable[[int, int, int], None]


class Transfer:
    """One copy on its way. Waited for, or stopped, by the thread that asked for it."""

    def __init__(self, copy: Copy, chunk_bytes: int) -> None:
        self._copy = copy
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_stopped = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._num_copied = 0

    @property
    def has_ended(self) -> bool:
        """Whether nothing is being copied any more; ``wait`` then returns at once."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when every byte has arrived.

        Raises:
            Exception: what went wrong with the copy.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> int:
        """End the copy early; returns the bytes from the start on that have arrived.

        When it returns nothing is being written any more. Never raises: bytes that could
        not be copied have not arrived.
        """
        with self._lock:
            self._is_stopped = True
            if not self._has_begun:
                self._ended.set()
        self._ended.wait()
        return self._num_copied

    def run(self, make_copy: MakeCopy) -> None:
        """Make the copy, unless it has been stopped; for the queue's thread."""
        with self._lock:
            if self._is_stopped:
                return
            self._has_begun = True
        try:
            for chunk in self._chunks():
                if self._is_stopped:
                    break
                make_copy(*chunk)
                self._num_copied += chunk.num_bytes
        except BaseException as error:  # raised where it is waited for
            self._error = error
        finally:
            self._ended.set()

    def _chunks(self) -> Iterator[Copy]:
        target, source, num_bytes = self._copy
        for offset in range(0, num_bytes, self._chunk_bytes):
            length = min(self._chunk_bytes, num_bytes - offset)
            yield Copy(target + offset, source + offset, length)


class TransferQueue:
    """Transfers in one direction, in the order in which they were asked for."""

    def __init__(self, make_copy: MakeCopy, name: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._make_copy = make_copy
        self._chunk_bytes = chunk_bytes
        self._queue: SimpleQueue[Transfer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, copy: Copy) -> Transfer:
        """Start a copy, behind those that were started before."""
        transfer = Transfer(copy, self._chunk_bytes)
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        """Make what was asked for, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.run(self._make_copy)
