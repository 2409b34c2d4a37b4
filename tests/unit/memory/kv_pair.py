"""Two devices with one model, and what one copies for the other."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence

from gpupoold.memory.host import HostSlot
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.transfers import DeviceThread, PeerCache, PeerSlot, Transfer
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import GatedCopyStream, Rig, fill_blocks, geometry_of, read

ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "ascending": sorted,
    "descending": lambda blocks: sorted(blocks, reverse=True),
    "shuffled": lambda blocks: random.Random(1).sample(blocks, len(blocks)),
    "some": lambda blocks: random.Random(2).sample(blocks, len(blocks) // 2),
}


def all_extents(kv: KvMemory) -> list[int]:
    return list(range(kv.geometry.num_extents))


def backed(rig: Rig, layout: str) -> tuple[KvMemory, MemoryLedger, dict[int, bytes]]:
    """A model all of whose blocks are in use, and their bytes."""
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    written = fill_blocks(kv, ledger.allocate(ledger.num_free), layout)
    return kv, ledger, written


def check(rig: Rig, *kvs: KvMemory) -> None:
    for kv in kvs:
        kv.check_integrity()
    rig.pool.check_integrity()
    rig.host.slabs.check_integrity()


def export(rig: Rig, kv: KvMemory, blocks: Sequence[int]) -> tuple[HostSlot, Transfer, list[bool]]:
    """Begin to copy; with what is told of it."""
    told: list[bool] = []
    begun = kv.export(blocks, rig.outs, told.append)
    assert begun is not None
    return *begun, told


def row_by_row(kv: KvMemory, written: dict[int, bytes], blocks: Sequence[int]) -> bytes:
    """What a slot with these blocks should hold."""
    data, at = [], 0
    for row in kv.geometry.rows:
        data += [written[block][at : at + row.num_bytes] for block in blocks]
        at += row.num_bytes
    return b"".join(data)


def in_slot(slot: HostSlot) -> bytes:
    return b"".join(read(address, num_bytes) for address, num_bytes in slot.pieces())


def open_later(gate: GatedCopyStream) -> None:
    threading.Timer(0.02, gate.allow).start()


class Pair:
    """Two devices with one model; what the first exports the second reads in its host memory."""

    def __init__(self, layout: str, num_pages: int = 64) -> None:
        self.source, self.target = Rig(), Rig(num_pages)
        self.sender, self.sender_ledger, written = backed(self.source, layout)
        self.kv, self.ledger = self.target.kv(geometry_of(layout))
        # As many as the second has room for: the null block's extent is not for KV transfers.
        num_blocks = len(written) - (self.kv.geometry.blocks_per_extent - 1)
        self.written = dict(list(written.items())[:num_blocks])
        host = self.source.host
        self._thread = DeviceThread(self.target.device, "peers")
        self.cache = PeerCache(os.dup(host.fd), host.budget_bytes, self.target.device, self._thread)
        self.num_freed = 0
        self._sent: list[HostSlot] = []

    def kv_transfer(self, blocks: Sequence[int]) -> PeerSlot:
        """These blocks of the first device, as the second gets them."""
        slot, transfer, _ = export(self.source, self.sender, blocks)
        transfer.wait()
        self.sender.settle()
        self._sent.append(slot)
        return self.cache.slot(list(slot.blocks.extents), self._freed)

    def attach_slot(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the second device that have the bytes of these of the first."""
        attached = self.kv.attach_slot(self.kv_transfer(blocks), len(blocks))
        assert attached is not None
        assert len(set(attached)) == len(blocks)
        return attached

    def bring_in(self) -> None:
        """All that is on the host comes to the second device."""
        self.target.soil()
        while on_host := self.kv.index.extents(Place.HOST):
            self.target.page_in(self.kv, on_host[0])
            check(self.target, self.kv)

    def _freed(self) -> None:
        self.num_freed += 1

    def close(self) -> None:
        self.cache.leave()
        self._thread.close()
        for slot in self._sent:
            slot.free()
        self.source.close()
        self.target.close()
