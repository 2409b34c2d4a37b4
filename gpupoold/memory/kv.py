"""A model's KV memory: which blocks the engine may use, and where their bytes are.

vLLM believes in a large fixed pool of blocks. Only the blocks of *backed*
extents have pages; the others are held back from its free list ("ballast"), so
running out of pages is a scheduling decision and never a fault. A paused
model's extents may be moved to host memory below its block tables, and come
back under the same block numbers.

An extent that is not whole on the device is *away*. The engine may not run requests
with blocks in it, and gets none of its blocks: those that are free are held until it
is back, so that no copy ever writes where the engine does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpupoold.memory.address_ranges import AddressRange
from gpupoold.memory.contracts import BlockLedger, Copy, Device
from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.host import HostSlot, KvHostCache, Slot
from gpupoold.memory.kv_extents import AWAY, Group, KvExtents, Place
from gpupoold.memory.libc import memcpy
from gpupoold.memory.transfers import Transfer, TransferQueue


@dataclass(frozen=True, slots=True)
class _Export:
    """Blocks that are kept until their bytes have been copied for another device."""

    blocks: list[int]
    transfer: Transfer


class KvMemory(KvExtents):
    """Backs, frees, pages out and pages in the extents of one model's KV address range."""

    def __init__(
        self, geometry: KvGeometry, address_range: AddressRange, device: Device, host: KvHostCache
    ) -> None:
        super().__init__(geometry, address_range, device)
        self._host = host
        self.arrived_bytes = 0
        """Bytes that have come back to the device so far."""
        self._exports: list[_Export] = []

    def attach(self, ledger: BlockLedger) -> None:
        """Take every block from the engine; ``back`` gives them out again."""
        self._ledger = ledger
        ledger.watch(self._index)
        ledger.hold(self._real(range(self.geometry.num_blocks)))

    def back(self, extents: list[int]) -> None:
        """Map zeroed pages for unbacked ``extents`` and give their blocks to the engine.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert all(self.place(extent) is Place.UNBACKED for extent in extents)
        self._retain(extents, is_filled=True)
        self._index.put(extents, Place.DEVICE)
        for extent in extents:
            self._engine().give(self._real(self.geometry.blocks(extent)))

    def unback(self, extents: list[int]) -> None:
        """Take away ``extents`` that have no live block; cached prefixes in them are forgotten."""
        if not extents:
            return
        assert all(self.place(extent) is Place.DEVICE for extent in extents)
        for extent in extents:
            self._engine().hold(self._real(self.geometry.blocks(extent)))
        self._index.put(extents, Place.UNBACKED)
        self._drop(extents)

    @contextlib.contextmanager
    def without_ballast(self) -> Iterator[None]:
        """Let the engine have all its blocks for an operation that wants the pool whole.

        Nothing may be scheduled meanwhile: most of the blocks have no pages.
        """
        ballast = self._real_of(self.extents(Place.UNBACKED))
        ballast += [block for group in self._groups() for block in group.held]
        self._engine().give(ballast)
        try:
            yield
        finally:
            self._engine().hold(ballast)

    def begin_page_out(self, extents: list[int], queue: TransferQueue) -> int:
        """Start to move the live blocks of extents to the host, until the host is full.

        Returns how many of ``extents``, from the first on, the host had room for. The model
        must be paused. Pages come free with the ``settle`` after the transfer; those of
        extents without a live block now. Cached prefixes in free blocks are forgotten: their
        bytes do not travel.
        """
        assert all(self.place(extent) is Place.DEVICE for extent in extents)
        self.finish_exports()  # pages that are read from must not go
        room = self._host.num_free_blocks(self.geometry.block_bytes)
        totals = itertools.accumulate(map(self._index.num_used, extents))
        num_done = sum(1 for _ in itertools.takewhile(lambda total: total <= room, totals))
        done = extents[:num_done]
        leaving = sorted(extent for extent in done if self._index.num_used(extent))
        self.unback([extent for extent in done if not self._index.num_used(extent)])
        if leaving:
            everything = self._real_of(leaving)
            blocks = self._engine().live(everything)
            slot = self._host.allocate(self.geometry.block_bytes, len(blocks))
            assert slot is not None
            group = Group(leaving, slot, blocks)
            if len(blocks) < len(everything):
                self._hold(group, set(everything) - set(blocks))
            group.transfer = queue.begin([Copy(h, d, n) for d, h, n in self._pieces(group)])
            self._put(group, Place.LEAVING)
        return num_done

    def begin_page_in(self, extents: Iterable[int], queue: TransferQueue) -> None:
        """Start to bring extents, and those that left with each, back under the same block ids;
        ``settle`` ends it. Neighbours are mapped by one call, whatever groups they are in.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        groups = list(dict.fromkeys(self._away[extent] for extent in extents))
        assert all(group.place is Place.HOST for group in groups)
        coming = sorted(extent for group in groups for extent in group.extents)
        fresh = self._retain(coming, is_filled=False)
        blocks = sorted(block for group in groups for block in group.blocks)
        for offset, num_bytes in self.geometry.gaps(fresh, blocks):
            self._device.zero(self.address + offset, num_bytes)
        for group in groups:
            group.transfer = queue.begin([Copy(d, h, n) for d, h, n in self._pieces(group)])
            self._put(group, Place.ARRIVING)

    def export(
        self, blocks: Sequence[int], queue: TransferQueue, on_end: Callable[[bool], None]
    ) -> tuple[HostSlot, Transfer] | None:
        """Start to copy the bytes of blocks, row by row in their order, to a slot of the host.

        They stay as they are until ``settle`` after the copy, whatever becomes of their request.
        ``on_end`` is called, by another thread, with whether all bytes are there. None, and
        nothing begun, when the host has no room. What is on its way meanwhile is called back.
        """
        self.stop_leaving()
        self.stop_arriving()
        slot = self._host.allocate(self.geometry.block_bytes, len(blocks))
        if slot is None:
            return None
        copies = []
        for source, target, num_bytes in slot.beside(self.whereabouts(blocks)):
            if self.address <= source < self.address + self.geometry.total_bytes:
                copies.append(Copy(target, source, num_bytes))
            else:
                memcpy(target, source, num_bytes)
        self._engine().keep(blocks)
        transfer = queue.begin(copies, on_end)
        self._exports.append(_Export(list(blocks), transfer))
        return slot, transfer

    def attach_slot(self, slot: Slot, num_blocks: int) -> list[int] | None:
        """Have so many blocks that the engine does not have, whose bytes are in ``slot``.

        Row by row in the order of the ids that are returned. They are the caller's to give back
        to the engine, and ``slot`` is freed when nobody needs it. None when there are too few.
        """
        extents, blocks = self._unbacked(num_blocks)
        if len(blocks) < num_blocks:
            self.unback([extent for extent in self.free_extents() if extent])
            extents, blocks = self._unbacked(num_blocks)
        if len(blocks) < num_blocks:
            return None
        if not extents:
            slot.free()
            return []
        group = Group(extents, slot, blocks[:num_blocks], set(blocks[num_blocks:]))
        self._put(group, Place.HOST)
        return group.blocks

    def _unbacked(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Extents without pages that have so many blocks, if there are enough, and the blocks.

        Not the null block's extent, which kernels touch at any time.
        """
        extents: list[int] = []
        blocks: list[int] = []
        for extent in self._index.each(Place.UNBACKED):
            if len(blocks) >= num_blocks:
                break
            if extent:
                extents.append(extent)
                blocks += self.geometry.blocks(extent)
        return extents, blocks

    def finish_exports(self) -> None:
        """Wait until nothing is being copied for other devices."""
        for export in self._exports:
            with contextlib.suppress(Exception):  # told to who waits for the bytes
                export.transfer.wait()
        self.settle_exports()

    def settle(self) -> None:
        """Take note of the transfers that have ended.

        Raises:
            Exception: a copy failed; its extents are where they were before.
        """
        self.settle_exports()
        gone: list[int] = []
        try:
            for group in list(self._moving):
                if group.transfer is not None and group.transfer.has_ended:
                    gone += self._finish(group, group.transfer)
        finally:
            # Together: neighbours are unmapped by one call, whatever groups they left in.
            if gone:
                self._drop(sorted(gone))

    def finish(self, place: Place) -> None:
        """Wait for all extents ``LEAVING`` or ``ARRIVING`` to have got there.

        Raises:
            Exception: a copy failed; its extents are where they were before.
        """
        for group in self._groups(place):
            if group.transfer is not None:
                group.transfer.wait()
                if not self._device.is_host_addressable:  # there unmapping slows the copies
                    self.settle()
        self.settle()

    def oldest_transfer(self, place: Place) -> Transfer | None:
        """The first of the transfers of extents ``LEAVING`` or ``ARRIVING``."""
        return next((group.transfer for group in self._moving if group.place is place), None)

    def stop_leaving(self) -> None:
        """What is on its way to the host stays on the device after all."""
        self._stop(Place.LEAVING)

    def stop_arriving(self) -> None:
        """What is on its way to the device stays on the host, but for what has arrived."""
        self._stop(Place.ARRIVING)

    def discard_dead(self) -> None:
        """Take note that requests have ended: keep the engine from blocks of away extents, and
        let go of extents that nobody needs any more (those under way when they have come)."""
        groups = {self._away[extent]: None for extent in sorted(self._index.take_freed_away())}
        for group in groups:
            wanted = [block for block in group.blocks if block not in group.held]
            self._hold(group, set(wanted) - set(self._engine().live(wanted)))
            if group.transfer is None and self._is_dead(group):
                self._let_go(group)

    def close(self) -> None:
        """Stop transfers, free host slots and the address range; the engine must be gone."""
        for export in self._exports:  # to the end: others wait for the bytes
            with contextlib.suppress(Exception):
                export.transfer.wait()
        for group in self._groups():
            if group.transfer is not None:
                group.transfer.stop()
            group.slot.free()
        self._away.clear()
        self._all_groups.clear()
        self._moving.clear()
        self._address_range.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the address range disagree."""
        self._address_range.check_integrity()
        self._index.check(self._engine().live(self._real(range(self.geometry.num_blocks))))
        self._check_counters()
        assert set(self._away) == {extent for place in AWAY for extent in self.extents(place)}
        mapped = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)
        extents = [extent for place in mapped for extent in self.extents(place)]
        assert len(self.geometry.uses(extents)) == self._address_range.num_mapped
        for group in self._groups():
            [place] = {self.place(extent) for extent in group.extents}
            assert group.place is place
            idle = set(self._real_of(group.extents)) - set(group.blocks)
            assert idle <= group.held, f"free blocks of away extents {group.extents} are not held"
            assert self._engine().live(group.blocks) == group.blocks
            assert (group.transfer is None) == (place is Place.HOST)

    def _check_counters(self) -> None:
        """Raise AssertionError when what is kept on every change is not what a scan finds."""
        groups = list(dict.fromkeys(self._away.values()))
        assert set(groups) == set(self._all_groups)
        on_host = [group for group in groups if group.place is Place.HOST]
        assert set(self._moving) == set(groups) - set(on_host)
        assert self._host_bytes == sum(group.slot.num_bytes for group in groups)
        assert self._missing_bytes == sum(group.slot.num_bytes for group in on_host)
        assert self.num_leaving_pages == self.num_resident_pages(self.extents(Place.LEAVING))
        assert self.num_idle_pages == self.num_resident_pages(self.free_extents())
        assert self.num_returning_pages == self.num_missing_pages(self.extents(Place.HOST))

    def settle_exports(self) -> None:
        """Let go of blocks whose copies for other devices have been made."""
        if not self._exports:
            return
        ended = [export for export in self._exports if export.transfer.has_ended]
        if ended:
            self._exports = [export for export in self._exports if export not in ended]
            self._engine().give([block for export in ended for block in export.blocks])
            self.discard_dead()

    def _finish(self, group: Group, transfer: Transfer) -> list[int]:
        """See :meth:`_settle_at`.

        Raises:
            Exception: a copy failed.
        """
        is_leaving = group.place is Place.LEAVING
        try:
            transfer.wait()
        except BaseException:
            self._drop(self._settle_at(group, Place.DEVICE if is_leaving else Place.HOST))
            raise
        return self._settle_at(group, Place.HOST if is_leaving else Place.DEVICE)

    def _stop(self, place: Place) -> None:
        moving = [(group, group.transfer) for group in self._groups(place) if group.transfer]
        for _, transfer in moving:
            transfer.cancel()  # else the next would begin while the first is waited for
        for group, transfer in moving:
            num_copied = transfer.stop()
            is_here = place is Place.LEAVING or num_copied == transfer.num_bytes
            self._drop(self._settle_at(group, Place.DEVICE if is_here else Place.HOST))

    def _settle_at(self, group: Group, place: Place) -> list[int]:
        """Note that all of a group is on the device, or on the host and only there.

        Returns the extents whose pages are to be dropped.
        """
        group.transfer = None
        if place is Place.DEVICE and group.place is Place.ARRIVING:
            self.arrived_bytes += group.slot.num_bytes
        self._put(group, place)
        if place is Place.HOST:
            if self._is_dead(group):
                self._let_go(group)
            return group.extents
        group.slot.free()
        self._engine().give(sorted(group.held))
        return []

    def _let_go(self, group: Group) -> None:
        """Of a group on the host that nobody needs."""
        self._put(group, Place.UNBACKED)
        group.slot.free()

    def _hold(self, group: Group, blocks: set[int]) -> None:
        self._engine().hold(sorted(blocks))
        group.held |= blocks

    def _retain(self, extents: list[int], *, is_filled: bool) -> list[range]:
        """Map extents; returns the pages that were not mapped before."""
        held: list[range] = []
        fresh: list[range] = []
        try:
            for span in self.geometry.spans(extents):
                fresh += self._address_range.retain(span, is_filled=is_filled)
                held.append(span)
        except BaseException:
            for span in held:
                self._address_range.drop(span)
            raise
        return fresh

    def _drop(self, extents: list[int]) -> None:
        self._address_range.drop_each(self.geometry.spans(extents))

    def _pieces(self, group: Group) -> Iterator[tuple[int, int, int]]:
        """``(device address, host address, num_bytes)``: in the slot, rows follow each other."""
        extents = self.geometry.extents(group.blocks)
        return group.slot.beside((self.address + offset, size) for offset, size in extents)
