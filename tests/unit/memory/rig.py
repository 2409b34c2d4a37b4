"""One emulated device with its pool and host cache, and models on it, for the memory tests."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gpupoold.memory.device import AddressRange, Copy, CopyStream, Direction
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import KvGeometry, KvRow, Place
from gpupoold.memory.pages import PagePool, PageRun
from gpupoold.memory.transfers import TransferQueue
from gpupoold.memory.weights import WeightMemory
from tests.unit.memory.ledger import MemoryLedger

PAGE = 4096

# (num_blocks, rows): where block b of each row lies in the KV buffer.
LAYERS_OUTERMOST = (16, tuple(KvRow(layer * 16 * 2048, 2048, 2048) for layer in range(3)))
BLOCKS_OUTERMOST = (12, (KvRow(0, 3 * PAGE, 3 * PAGE),))
UNALIGNED = (11, tuple(KvRow(layer * 11 * 1500 + 100, 1500, 1500) for layer in range(2)))
# Two kinds of layer on the same blocks: the second uses less of each, elsewhere in the buffer.
HYBRID = (10, (KvRow(0, 6000, 6000), KvRow(60_000, 6000, 1000)))
SMALL_BLOCKS = (40, tuple(KvRow(layer * 40 * 512, 512, 512) for layer in range(2)))
LAYOUTS = {
    "small-blocks": SMALL_BLOCKS,
    "layers-outermost": LAYERS_OUTERMOST,
    "blocks-outermost": BLOCKS_OUTERMOST,
    "unaligned": UNALIGNED,
    "hybrid": HYBRID,
}


def geometry_of(layout: str, page_bytes: int = PAGE) -> KvGeometry:
    num_blocks, rows = LAYOUTS[layout]
    return KvGeometry(num_blocks, page_bytes, rows)


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def pattern(key: object, num_bytes: int) -> bytes:
    """Bytes that depend on ``key`` and hold no zero, so that a zeroed page shows."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    nonzero = bytes(byte or 1 for byte in digest)
    return (nonzero * (num_bytes // len(nonzero) + 1))[:num_bytes]


class FailingDevice(EmulatedDevice):
    """An emulated device; ``fail_in`` n lets the n-th next fill fail, for want of mappings."""

    fail_in = 0

    def map(self, address: int, runs: list[PageRun]) -> None:
        if self.fail_in and not self._is_filling:
            self._count_down()
        super().map(address, runs)

    _is_filling = False

    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        if self.fail_in:
            self._count_down()
        self._is_filling = True
        try:
            super().map_and_fill(address, runs, source)
        finally:
            self._is_filling = False

    def _count_down(self) -> None:
        self.fail_in -= 1
        if not self.fail_in:
            raise OSError(errno.ENOMEM, "too many mappings")


class GatedCopyStream:
    """A copy stream that begins as many batches as are allowed; ``error`` is raised by the next."""

    def __init__(self, copy_stream: CopyStream) -> None:
        self._copy_stream = copy_stream
        self._allowed = threading.Condition()
        self._num_allowed: float = math.inf
        self.error: Exception | None = None

    @property
    def is_closed(self) -> bool:
        return not self._num_allowed

    def allow(self, num_batches: float = math.inf) -> None:
        """Let this many more batches begin; with 0 the next waits."""
        with self._allowed:
            self._num_allowed = num_batches
            self._allowed.notify_all()

    def wait_until_allowed(self) -> None:
        with self._allowed:
            self._allowed.wait_for(lambda: self._num_allowed)

    def fence(self) -> int:
        return self._copy_stream.fence()

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        with self._allowed:
            self.wait_until_allowed()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self._num_allowed -= 1
        return self._copy_stream.begin(copies, after)

    def wait(self, batch: int) -> None:
        self._copy_stream.wait(batch)

    def close(self) -> None:
        self._copy_stream.close()


class Rig:
    """A device of ``num_pages``; ``close`` checks that everything came back."""

    def __init__(self, num_pages: int = 64, host_pages: int = 64, page_bytes: int = PAGE) -> None:
        self.device = FailingDevice(num_pages * page_bytes, page_bytes)
        self.pool = PagePool(num_pages, table_pages=4)
        self.host = KvHostCache(host_pages * page_bytes, page_bytes)
        self.in_copy_stream = GatedCopyStream(self.device.open_copy_stream(Direction.IN))
        self.out_copy_stream = GatedCopyStream(self.device.open_copy_stream(Direction.OUT))
        self.ins = TransferQueue([self.in_copy_stream], "copy-in", batch_bytes=2 * page_bytes)
        self.outs = TransferQueue([self.out_copy_stream], "copy-out", batch_bytes=2 * page_bytes)
        self._open: list[AddressRange | KvMemory | WeightMemory] = []

    def address_range(self, num_pages: int) -> AddressRange:
        address_range = AddressRange(self.device, self.pool, num_pages)
        self._open.append(address_range)
        return address_range

    def kv(self, geometry: KvGeometry) -> tuple[KvMemory, MemoryLedger]:
        address_range = AddressRange(self.device, self.pool, geometry.num_pages)
        kv = KvMemory(geometry, address_range, self.device, self.host)
        ledger = MemoryLedger(geometry.num_blocks)
        kv.attach(ledger)
        self._open.append(kv)
        return kv, ledger

    def weights(
        self, num_pages: int, key: object, num_own_pages: int = 0
    ) -> tuple[WeightMemory, bytes]:
        """Weights, and the bytes of all pages; the last ``num_own_pages`` are no snapshot."""
        snapshot = HostBuffer.create("test-snapshots", num_pages * self.device.page_bytes)
        data = pattern(key, snapshot.num_bytes)
        write(snapshot.address, data)
        own = None
        if num_own_pages:
            own = HostBuffer.create("test-slots", num_own_pages * self.device.page_bytes)
            slots = pattern((key, "slots"), own.num_bytes)
            write(own.address, slots)
            data += slots
        address_range = AddressRange(self.device, self.pool, num_pages + num_own_pages)
        weights = WeightMemory(address_range, self.device, snapshot, own)
        self._open.append(weights)
        return weights, data

    @contextlib.contextmanager
    def copies_held(self) -> Iterator[None]:
        """No copy of a queue begins inside."""
        self.in_copy_stream.allow(0)
        self.out_copy_stream.allow(0)
        try:
            yield
        finally:
            self.in_copy_stream.allow()
            self.out_copy_stream.allow()

    def page_out(self, kv: KvMemory, extent: int) -> bool:
        """Page an extent out and wait for it; whether the host had room."""
        done = kv.begin_page_out([extent], self.outs)
        self.finish(kv)
        return done == 1

    def page_in(self, kv: KvMemory, extent: int) -> None:
        """Page an extent in and wait for it."""
        kv.begin_page_in([extent], self.ins)
        self.finish(kv)

    def finish(self, kv: KvMemory) -> None:
        """Wait for all transfers of a model."""
        for place in (Place.LEAVING, Place.ARRIVING):
            kv.finish(place)

    def soil(self) -> None:
        """Leave bytes of "another model" in every free page."""
        num_pages = self.pool.num_free
        other = AddressRange(self.device, self.pool, num_pages)
        other.retain(range(num_pages))
        write(other.address, b"\xee" * (num_pages * self.device.page_bytes))
        other.close()

    def close(self) -> None:
        for part in self._open:
            part.close()
        self.pool.check_integrity()
        self.host.slabs.check_integrity()
        assert self.pool.num_free == self.pool.num_pages
        assert self.host.used_bytes == 0
        self.ins.close()
        self.outs.close()
        self.host.close()
        self.device.close()


def write_block(kv: KvMemory, block: int, data: bytes) -> None:
    """Fill a block, row by row, with ``data`` of ``geometry.block_bytes``."""
    for row in kv.geometry.rows:
        write(kv.address + row.offset + block * row.stride, data[: row.num_bytes])
        data = data[row.num_bytes :]


def read_block(kv: KvMemory, block: int) -> bytes:
    rows = kv.geometry.rows
    return b"".join(read(kv.address + r.offset + block * r.stride, r.num_bytes) for r in rows)


def fill_blocks(kv: KvMemory, blocks: Sequence[int], key: object) -> dict[int, bytes]:
    """Write a pattern of its own to each block; returns what was written."""
    written = {block: pattern((key, block), kv.geometry.block_bytes) for block in blocks}
    for block, data in written.items():
        write_block(kv, block, data)
    return written


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
