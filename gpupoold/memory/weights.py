"""A model's weights: a snapshot in host memory, an address range on the device.

Mapping a snapshot takes time, as do unmapping and, on a GPU, unpinning: a thread does all of these,
and the turn loop collects the results between two steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from gpupoold.errors import Failed
from gpupoold.memory.device import AddressRange, Copy, Device
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import NO_NODE, most_used_node
from gpupoold.memory.pages import WeightsId
from gpupoold.memory.transfers import DeviceThread, Transfer, TransferQueue
from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire.messages import SnapshotDropped, SnapshotTaken

_HINT = "warm the model: `gpupool cache warm`"

_logger = logging.getLogger(__name__)


class WeightMemory:
    """The address range of a model's weights, filled from the snapshot and never copied back.

    Pages are loaded from the first on and evicted from the last on, so that restoring a partly
    evicted model copies only the missing pages. ``snapshot`` holds the bytes of the address range
    after vLLM's loading and post-processing, padded to whole pages. The snapshot is pinned, in idle
    moments, until ``close`` or after ``detach_snapshot``; without a snapshot no page is present and
    none can be loaded.

    The bytes of ``own`` follow those of the snapshot: the host copy of slots that the engine writes
    while resident, such as those of adapters. ``write_back`` keeps the copy equal to the device.
    The snapshot may be shared with other workers; ``own`` belongs to this object.

    A method that waits for copies raises the failure of a copy, and frees the pages that have not
    arrived.
    """

    def __init__(
        self,
        address_range: AddressRange,
        device: Device,
        snapshot: HostBuffer,
        own: HostBuffer | None = None,
    ) -> None:
        self.address_range = address_range
        self._device = device
        self._num_loaded = 0
        self._arriving: deque[Transfer] = deque()
        self._start_bytes: int | None = None
        self._snapshot: HostBuffer | None = None
        self.is_far = False
        """True if the snapshot is on another NUMA node than the device."""
        self.own: HostBuffer | None = None
        """The host copy of the slots."""
        self.own_bytes = own.num_bytes if own is not None else 0
        device.pin_later(snapshot.address, snapshot.num_bytes)
        self.attach_snapshot(snapshot)
        if own is not None:
            device.pin_later(own.address, own.num_bytes)
            self.own = own

    @property
    def has_snapshot(self) -> bool:
        """True if the snapshot is in host memory."""
        return self._snapshot is not None

    @property
    def snapshot(self) -> HostBuffer:
        """The snapshot.

        Raises Failed: the snapshot is detached.
        """
        if self._snapshot is None:
            raise Failed("the snapshot of these weights is not in host memory", _HINT)
        return self._snapshot

    @property
    def num_pages(self) -> int:
        return self.address_range.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self._device.page_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the whole snapshot, also while detached."""
        return self.num_bytes - self.own_bytes

    @property
    def num_mapped_pages(self) -> int:
        """Number of mapped pages, filled or being filled."""
        return self.address_range.num_mapped

    @property
    def mapped_bytes(self) -> int:
        return self.num_mapped_pages * self._device.page_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes from the start on that are known to be present."""
        return self._num_loaded * self._device.page_bytes

    @property
    def num_missing_pages(self) -> int:
        """Number of pages still to be mapped."""
        return self.num_pages - self.num_mapped_pages

    @property
    def missing_bytes(self) -> int:
        """Bytes neither present nor in transfer."""
        return self.num_missing_pages * self._device.page_bytes

    @property
    def is_resident(self) -> bool:
        """True if all weights are present, so that the model can run."""
        return self._num_loaded == self.num_pages

    @property
    def start_bytes(self) -> int:
        """Bytes from the start on with which a step may begin; all, unless set."""
        return self.num_bytes if self._start_bytes is None else self._start_bytes

    @start_bytes.setter
    def start_bytes(self, num_bytes: int) -> None:
        """Let steps begin while bytes behind ``num_bytes`` arrive, for which the steps wait."""
        assert 0 < num_bytes <= self.num_bytes and not self.own_bytes
        self._start_bytes = num_bytes

    @property
    def can_start(self) -> bool:
        """True if a step may begin: the first bytes are present, all others present or arriving."""
        if self._start_bytes is None or self.is_resident:
            return self.is_resident
        return not self.num_missing_pages and self.present_bytes >= self._start_bytes

    @property
    def present_bytes(self) -> int:
        """Bytes from the start on that have arrived, of a load in progress too."""
        first = self._arriving[0].num_copied_bytes if self._arriving else 0
        return self.loaded_bytes + first

    @property
    def arriving_bytes(self) -> int:
        """Bytes of mapped pages that have not arrived."""
        return max(0, self.mapped_bytes - self.present_bytes)

    @property
    def num_arriving(self) -> int:
        """Number of loads in progress."""
        return sum(not transfer.has_ended for transfer in self._arriving)

    @property
    def address(self) -> int:
        return self.address_range.address

    def load(self, num_pages: int | None = None) -> int:
        """Load the next ``num_pages``, or all missing pages; return the number of copied bytes.

        Waits for an earlier ``begin_load``, whose bytes are not counted.

        Raises:
            OutOfPages: the pool is short; pages present or in transfer stay.
            Failed: there is no snapshot.
        """
        self.wait()
        end = self.num_pages if num_pages is None else self._num_loaded + num_pages
        missing = range(self._num_loaded, min(end, self.num_pages))
        for pages, source in self._sources(missing):
            self.address_range.retain(pages, source)
            self._device.synchronize()
            self._num_loaded = pages.stop
        return len(missing) * self._device.page_bytes

    def begin_load(self, queue: TransferQueue, num_pages: int) -> None:
        """Start to load the next ``num_pages``, or the remaining pages if fewer.

        Follows the loads in progress.

        Raises:
            OutOfPages: the pool is short; nothing was started.
            Failed: there is no snapshot.
        """
        self.settle()
        page_bytes = self._device.page_bytes
        first = self.num_mapped_pages
        pages = range(first, min(first + num_pages, self.num_pages))
        if not pages:
            return
        copies = [
            Copy(self.address + part.start * page_bytes, source, len(part) * page_bytes)
            for part, source in self._sources(pages)
        ]
        self.address_range.retain(pages, is_filled=False)
        self._arriving.append(queue.begin(copies))

    def write_back(self) -> None:
        """Copy the resident slots to ``own``, after the engine has written to them."""
        if self.own is None:
            return
        assert self.is_resident, "slots are written while the model is resident"
        self._device.copy_out(self.own.address, self.address + self.snapshot_bytes, self.own_bytes)
        self._device.synchronize()

    def settle(self) -> None:
        """Count pages as present that have arrived.

        Raises Exception: a copy failed; pages that had not arrived were freed.
        """
        while self._arriving and self._arriving[0].has_ended:
            self._finish_first()

    def wait(self) -> None:
        """Return when the pages being loaded have arrived.

        Raises Exception: a copy failed; pages that had not arrived were freed.
        """
        while self._arriving:
            self._finish_first()

    def wait_for(self, num_bytes: int) -> None:
        """Return when the first ``num_bytes``, which are present or arriving, are present.

        Raises Exception: a copy failed; pages that had not arrived were freed.
        """
        while (missing := num_bytes - self.loaded_bytes) > 0:
            assert self._arriving, f"{missing} bytes are waited for that do not arrive"
            if missing >= self._arriving[0].num_bytes:
                self._finish_first()
                continue
            with self._stopped_by_failure():
                self._arriving[0].wait_for(missing)
            return

    @contextlib.contextmanager
    def _stopped_by_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _finish_first(self) -> None:
        with self._stopped_by_failure():
            self._arriving[0].wait()
        self._num_loaded += self._arriving.popleft().num_bytes // self._device.page_bytes

    def stop(self) -> None:
        """Stop all loads; free pages that have not been filled."""
        if not self._arriving:
            return
        for transfer in self._arriving:
            transfer.cancel()  # all before any wait, else the next one would start meanwhile
        is_whole = True
        for transfer in self._arriving:
            num_bytes = transfer.stop()
            if is_whole:  # behind a gap nothing is usable
                self._num_loaded += num_bytes // self._device.page_bytes
                is_whole = num_bytes == transfer.num_bytes
        self._arriving.clear()
        self._drop_from(self._num_loaded)

    def evict(self, num_pages: int | None = None) -> None:
        """Free the last ``num_pages``, or all; stop transfers in progress."""
        kept = 0 if num_pages is None else max(0, self.num_mapped_pages - num_pages)
        self.stop()
        self._num_loaded = min(self._num_loaded, kept)
        self._drop_from(self._num_loaded)

    def unbind(self, owner: WeightsId) -> None:
        """Free all pages, whose contents stay for :meth:`bind` as long as no page is needed."""
        assert not self.own_bytes
        self.stop()
        self._num_loaded = 0
        if self.num_mapped_pages:
            self.address_range.unbind(owner, range(self.num_mapped_pages))

    def bind(self, owner: WeightsId, num_pages: int) -> bool:
        """Map up to ``num_pages`` of the pages that have stayed; return whether more may follow.

        The contents are those of the present snapshot. No load may be in progress.
        """
        assert not self._arriving
        num_bound = self.address_range.bind(owner, self._num_loaded, num_pages)
        self._num_loaded += num_bound
        return num_bound == num_pages

    def detach_snapshot(self) -> HostBuffer:
        """Free all pages; return the snapshot, which the caller unpins and closes.

        Raises Failed: there is no snapshot.
        """
        snapshot = self.snapshot
        self.evict()
        self._snapshot = None
        return snapshot

    def attach_snapshot(self, snapshot: HostBuffer) -> None:
        """Attach a snapshot of the same model and layout, given to ``pin_later`` by the caller."""
        assert self._snapshot is None
        assert snapshot.num_bytes == self.snapshot_bytes
        self._snapshot = snapshot
        if (own_node := self._device.rank_nodes[0]) != NO_NODE:
            node = most_used_node(snapshot.address, snapshot.num_bytes)
            self.is_far = NO_NODE != node != own_node

    def close(self) -> None:
        """Unmap, release the addresses and this process's view of the snapshot."""
        self.stop()
        self.address_range.close()
        for buffer in (self._snapshot, self.own):
            if buffer is not None:
                self._device.unpin_later(buffer.address, buffer.num_bytes, buffer.close)

    def _sources(self, pages: range) -> Iterator[tuple[range, int]]:
        """Yield ``pages`` in parts, each with the host address of its bytes."""
        page_bytes = self._device.page_bytes
        first_own = self.snapshot_bytes // page_bytes
        shared = range(pages.start, min(pages.stop, first_own))
        if shared:
            yield shared, self.snapshot.address + shared.start * page_bytes
        own = range(max(pages.start, first_own), pages.stop)
        if own and self.own is not None:
            yield own, self.own.address + (own.start - first_own) * page_bytes

    def _drop_from(self, first: int) -> None:
        pages = range(first, self.address_range.num_mapped)
        if pages:
            self.address_range.drop(pages)


class Snapshots:
    """Drops and attaches snapshots of models without requests, for the turn loop's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = DeviceThread(device, "snapshots")
        self._dropping: dict[str, Future[None]] = {}
        self._taking: dict[str, tuple[WeightMemory, Future[HostBuffer]]] = {}

    @property
    def is_busy(self) -> bool:
        """True if ``finished`` will return further results."""
        return bool(self._dropping or self._taking)

    def drop(self, model: str, weights: WeightMemory | None) -> None:
        """Evict a model's weights from the device and unmap its snapshot, if any."""
        self.forget(model)
        snapshot = weights.detach_snapshot() if weights and weights.has_snapshot else None
        self._dropping[model] = self._thread.submit(self._close, model, snapshot)

    def take(self, model: str, weights: WeightMemory, fd: int) -> None:
        """Attach the snapshot behind ``fd`` to a model; this object owns ``fd`` from now on."""
        self.forget(model)
        if weights.has_snapshot:
            self._thread.submit(self._close, model, weights.detach_snapshot())
        taken = self._thread.submit(self._open, model, fd, weights.snapshot_bytes)
        self._taking[model] = weights, taken

    def forget(self, model: str) -> None:
        """Discard the snapshot that is being attached to a removed or changed model."""
        taking = self._taking.pop(model, None)
        if taking is not None:
            self._thread.submit(self._discard, model, taking[1])

    def finished(self) -> list[SnapshotDropped | SnapshotTaken]:
        """Return the thread's results since the last call as messages to the daemon.

        Attached snapshots belong to the models from then on.
        """
        if not (self._dropping or self._taking):
            return []
        messages: list[SnapshotDropped | SnapshotTaken] = []
        for model, dropped in list(self._dropping.items()):
            if dropped.done():
                del self._dropping[model]
                if (error := dropped.exception()) is not None:
                    _logger.error("cannot unmap the snapshot of %s: %s", model, error)
                messages.append(SnapshotDropped(model))
        for model, (weights, taken) in list(self._taking.items()):
            if taken.done():
                del self._taking[model]
                error = taken.exception()
                if error is None:
                    weights.attach_snapshot(taken.result())
                messages.append(SnapshotTaken(model, "" if error is None else str(error)))
        return messages

    def close(self) -> None:
        """End the thread; unmap snapshots without a model."""
        for model in list(self._taking):
            self.forget(model)
        self._thread.close()

    def _open(self, model: str, fd: int, num_bytes: int) -> HostBuffer:
        found_bytes = os.fstat(fd).st_size
        wanted_bytes = num_bytes * self._device.num_ranks
        if found_bytes != wanted_bytes:
            os.close(fd)
            text = f"the snapshot has {found_bytes} bytes, the weights have {wanted_bytes}"
            raise ValueError(text)
        with WORKER.beside(ThreadPhase.SNAPSHOT, model):
            snapshot = HostBuffer(fd, num_bytes)
            try:
                self._device.pin_later(snapshot.address, num_bytes)
                self._device.share_host(snapshot.address, num_bytes, fd)
            except BaseException:
                snapshot.close()
                raise
            return snapshot

    def _close(self, model: str, snapshot: HostBuffer | None) -> None:
        if snapshot is None:
            return
        with WORKER.beside(ThreadPhase.SNAPSHOT, model):
            try:
                self._device.unpin(snapshot.address, snapshot.num_bytes)
            finally:
                snapshot.close()

    def _discard(self, model: str, taken: Future[HostBuffer]) -> None:
        if taken.exception() is None:
            self._close(model, taken.result())
