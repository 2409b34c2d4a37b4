"""KV that one worker has copied to its host memory for another worker to read.

The host caches of all workers of a machine are shared memory: each worker maps the caches of the
other workers. A *KV transfer* is a slot of one of the caches. The sender keeps the slot until the
receiver reports that the slot is no longer needed, or the receiver has ended. An eventfd signals
the arrival of the bytes, so that no worker waits for a busy process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpupoold.memory.device import Device
from gpupoold.memory.host import HostBuffer, lay
from gpupoold.memory.transfers import DeviceThread

_logger = logging.getLogger(__name__)

_ARRIVED, _FAILED = 1, 2


class Arrival:
    """One end of an eventfd that signals to another process whether bytes have arrived."""

    def __init__(self, fd: int | None = None) -> None:
        """Own ``fd``, or create an eventfd."""
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
        """Return whether all bytes have arrived."""
        return self.is_signalled() and self._state == _ARRIVED

    def close(self) -> None:
        os.close(self.fd)


class PeerCache:
    """The host cache of another worker, mapped while any slot in the cache is in use.

    If the device copies only from pinned memory, a thread pins the cache, which takes seconds. The
    cache is not usable before, and never becomes usable if the driver refuses.
    """

    def __init__(self, fd: int, num_bytes: int, device: Device, thread: DeviceThread) -> None:
        """Map ``num_bytes`` of ``fd``, owned by this object from now on, and start pinning.

        Raises:
            OSError: the process has too few addresses.
        """
        self._buffer = HostBuffer(fd, num_bytes // device.num_ranks, is_populated=False)
        self._device = device
        self._thread = thread
        self._num_users = 1
        self._is_pinned = False
        if self._needs_pinning:
            thread.submit(self._pin)

    @property
    def is_usable(self) -> bool:
        """True if the device can copy from the cache at full speed."""
        return self._is_pinned or not self._needs_pinning

    def slot(self, offsets: Sequence[tuple[int, int]], on_free: Callable[[], None]) -> PeerSlot:
        """Return the slot at ``offsets``, a list of ``(offset, num_bytes)``, in a usable cache."""
        self._num_users += 1
        pieces = [(self._buffer.address + offset, num_bytes) for offset, num_bytes in offsets]
        return PeerSlot(self, pieces, on_free)

    def leave(self) -> None:
        """Remove one user, a slot or the creator; unmap the cache after the last."""
        self._num_users -= 1
        if self._num_users:
            return
        if self._needs_pinning:
            self._thread.submit(self._unmap)
        else:
            self._unmap()

    @property
    def _needs_pinning(self) -> bool:
        """True if this device's process, or another rank's, has to prepare copies."""
        return not self._device.is_host_addressable or self._device.num_ranks > 1

    def _pin(self) -> None:
        if not self._num_users:
            return  # the last user left before this job started
        started_s = time.monotonic()
        try:
            self._device.pin(self._buffer.address, self._buffer.num_bytes)
            self._device.share_host(self._buffer.address, self._buffer.num_bytes, self._buffer.fd)
        except Exception as error:  # affects only KV transfers from that cache
            _logger.error(
                "another worker's KV host cache cannot be pinned: %s; requests that migrate from "
                "that worker recompute their KV",
                error,
            )
            return
        self._is_pinned = True
        _logger.info(
            "pinned another worker's KV host cache in %.2f s", time.monotonic() - started_s
        )

    def _unmap(self) -> None:
        """Unpin and unmap the cache; on a device that needs pinning, in the thread of ``_pin``."""
        try:
            if self._is_pinned:
                self._device.unpin(self._buffer.address, self._buffer.num_bytes)
        except Exception:
            _logger.exception("cannot unpin another worker's KV host cache, which stays mapped")
        else:
            self._buffer.close()


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
