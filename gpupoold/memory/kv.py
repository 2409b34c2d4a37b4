"""A model's KV memory: the blocks for the engine, and the place of their bytes.

vLLM assumes a large fixed pool of blocks. Only the blocks of *mapped* extents have pages; all other
blocks are held back from vLLM's free list (*reserved blocks*), so running out of pages is a
scheduling decision and never a fault. Extents of a paused model may be offloaded to host memory and
restored under the same block numbers, so block tables stay valid.

An extent that is not completely on the device is *offloaded*. The engine may not run requests with
blocks in an offloaded extent, and the extent's free blocks are held until the extent is restored,
so that no copy overwrites the engine's writes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpupoold.memory.device import AddressRange, Copy, Device
from gpupoold.memory.host import HostSlot, KvHostCache, Slot
from gpupoold.memory.kv_extents import OFFLOADED, BlockLedger, Group, KvExtents, KvGeometry, Place
from gpupoold.memory.prefix_store import StoredBlocks
from gpupoold.memory.transfers import Transfer, TransferQueue


@dataclass(frozen=True, slots=True)
class _Export:
    """Blocks kept until their bytes have been copied; ``slot`` is then freed."""

    blocks: list[int]
    transfer: Transfer
    slot: Slot | None = None


class KvMemory(KvExtents):
    """Maps, unmaps, offloads and restores the extents of one model's KV address range."""

    def __init__(
        self, geometry: KvGeometry, address_range: AddressRange, device: Device, host: KvHostCache
    ) -> None:
        super().__init__(geometry, address_range, device)
        self._host = host
        self.arrived_bytes = 0
        """Bytes restored to the device so far."""
        self._exports: list[_Export] = []
        self._busy: dict[KvMemory, None] = {}

    def join(self, busy: dict[KvMemory, None]) -> None:
        """Be in ``busy``, which several models share, while ``settle`` may have work."""
        self._busy.pop(self, None)
        self._busy = busy
        self._note_busy()

    def attach(self, ledger: BlockLedger) -> None:
        """Hold every block of the engine; ``map`` gives blocks to the engine."""
        self._ledger = ledger
        ledger.watch(self.index)
        ledger.hold(self._real(range(self.geometry.num_blocks)))

    def map(self, extents: list[int]) -> None:
        """Map zeroed pages for unmapped ``extents`` and give their blocks to the engine.

        Raises OutOfPages: the pool is short; nothing was changed.
        """
        assert all(self.index.place(extent) is Place.UNMAPPED for extent in extents)
        self._retain(extents, is_filled=True)
        self.index.put(extents, Place.DEVICE)
        for extent in extents:
            self._engine().give(self._real(self.geometry.blocks(extent)))

    def unmap(self, extents: list[int]) -> None:
        """Unmap ``extents`` without a live block; drop their cached prefixes."""
        if not extents:
            return
        assert all(self.index.place(extent) is Place.DEVICE for extent in extents)
        for extent in extents:
            self._engine().hold(self._real(self.geometry.blocks(extent)))
        self.index.put(extents, Place.UNMAPPED)
        self._drop(extents)

    @contextlib.contextmanager
    def with_reserved_blocks(self) -> Iterator[None]:
        """Give the engine all held blocks during an operation that needs the whole pool.

        No request may be scheduled meanwhile: most of the blocks have no pages.
        """
        reserved = self._real_of(self.index.extents(Place.UNMAPPED))
        reserved += [block for group in self._groups() for block in group.held]
        self._engine().give(reserved)
        try:
            yield
        finally:
            self._engine().hold(reserved)

    def begin_page_out(self, extents: list[int], queue: TransferQueue) -> int:
        """Start to offload the live blocks of extents, until the host is full.

        Returns the number of extents, counted from the first, that fit into the host cache. The
        model must be paused. Pages of extents without a live block become free at once, other pages
        with the ``settle`` after the transfer. Cached prefixes in free blocks are dropped, not
        copied.
        """
        assert all(self.index.place(extent) is Place.DEVICE for extent in extents)
        self.finish_exports()  # exports still read pages that are unmapped below
        totals = list(itertools.accumulate(map(self.index.num_used, extents)))
        room = self._host.make_room(self.geometry.block_bytes, totals[-1] if totals else 0)
        num_done = sum(1 for _ in itertools.takewhile(lambda total: total <= room, totals))
        done = extents[:num_done]
        leaving = sorted(extent for extent in done if self.index.num_used(extent))
        self.unmap([extent for extent in done if not self.index.num_used(extent)])
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
        """Start to restore the groups of extents, under the same block ids.

        ``settle`` completes the restoration. Adjacent extents are mapped by one call, across
        groups.

        Raises OutOfPages: the pool is short; nothing was changed.
        """
        groups = list(dict.fromkeys(self._offloaded[extent] for extent in extents))
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
        """Start to copy the bytes of blocks, row by row in order, to a slot of the host.

        The blocks stay unchanged until ``settle`` after the copy, even if their request ends.
        Another thread calls ``on_end`` with True if all bytes have arrived, else False. Returns
        None without starting if the host is full. Transfers in progress are stopped first.
        """
        self.stop(Place.LEAVING)
        self.stop(Place.ARRIVING)
        slot = self._host.allocate(self.geometry.block_bytes, len(blocks))
        if slot is None:
            return None
        copies, is_split = [], False
        for source, target, num_bytes in slot.beside(self.whereabouts(blocks)):
            if self.address <= source < self.address + self.geometry.total_bytes:
                copies.append(Copy(target, source, num_bytes))
            else:
                self._device.copy_in_host(target, source, num_bytes)
                is_split = True
        if is_split:  # the end of the transfer tells of copies on the device only
            self._device.wait_for_ranks()
        transfer = self._begin_export(blocks, copies, queue, on_end)
        return slot, transfer

    def store(self, blocks: Sequence[int], copies: StoredBlocks, queue: TransferQueue) -> None:
        """Start to copy blocks, all on the device, to ``copies``, which are freed afterwards.

        The blocks stay unchanged until ``settle`` after the copy.
        """
        pieces = copies.beside(self._extents(blocks))
        moves = [Copy(target, source, num_bytes) for source, target, num_bytes in pieces]
        self._begin_export(blocks, moves, queue, copies.note_arrival, copies)

    def _begin_export(
        self,
        blocks: Sequence[int],
        copies: list[Copy],
        queue: TransferQueue,
        on_end: Callable[[bool], None],
        slot: Slot | None = None,
    ) -> Transfer:
        self._engine().keep(blocks)
        transfer = queue.begin(copies, on_end)
        self._exports.append(_Export(list(blocks), transfer, slot))
        self._note_busy()
        return transfer

    def attach_slot(
        self, slot: Slot, num_blocks: int, *, may_unmap: bool = True
    ) -> list[int] | None:
        """Put ``num_blocks`` blocks of unmapped extents at ``slot``'s bytes; return the block ids.

        The slot has the bytes row by row, in the order of the returned ids. The blocks stay held:
        the caller gives the blocks to the engine. ``slot`` is freed when no longer needed. Returns
        None if too few blocks are unmapped or, if ``may_unmap``, can be unmapped.
        """
        extents, blocks = self._unmapped_for(num_blocks)
        if len(blocks) < num_blocks and may_unmap:
            self.unmap([extent for extent in self.index.idle() if extent])
            extents, blocks = self._unmapped_for(num_blocks)
        if len(blocks) < num_blocks:
            return None
        if not extents:
            slot.free()
            return []
        group = Group(extents, slot, blocks[:num_blocks], set(blocks[num_blocks:]))
        self._put(group, Place.HOST)
        return group.blocks

    def _unmapped_for(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Return unmapped extents with at least ``num_blocks``, if available, and the blocks.

        Excludes the null block's extent, which kernels access at any time.
        """
        extents: list[int] = []
        blocks: list[int] = []
        for extent in self.index.each(Place.UNMAPPED):
            if len(blocks) >= num_blocks:
                break
            if extent:
                extents.append(extent)
                blocks += self.geometry.blocks(extent)
        return extents, blocks

    def finish_exports(self) -> None:
        """Wait for all copies to other devices."""
        for export in self._exports:
            with contextlib.suppress(Exception):  # on_end reports the failure to the receiver
                export.transfer.wait()
        self.settle_exports()

    def settle(self) -> None:
        """Process the transfers that have ended.

        Raises Exception: a copy failed; the extents of the copy are in their former place.
        """
        self.settle_exports()
        gone: list[int] = []
        try:
            for group in list(self._moving):
                if group.transfer is not None and group.transfer.has_ended:
                    gone += self._finish(group, group.transfer)
        finally:
            # All groups together: adjacent extents of different groups are unmapped by one call.
            if gone:
                self._drop(sorted(gone))

    def finish(self, place: Place) -> None:
        """Wait for all extents ``LEAVING`` or ``ARRIVING``.

        Raises Exception: a copy failed; the extents of the copy are in their former place.
        """
        for group in self._groups(place):
            if group.transfer is not None:
                group.transfer.wait()
                if not self._device.is_host_addressable:  # unmapping slows copies by the CPU
                    self.settle()
        self.settle()

    def oldest_transfer(self, place: Place) -> Transfer | None:
        """Return the oldest transfer of extents ``LEAVING`` or ``ARRIVING``, None without any."""
        return next((group.transfer for group in self._moving if group.place is place), None)

    def stop(self, place: Place) -> None:
        """Cancel transfers of extents ``LEAVING``, which stay on the device, or ``ARRIVING``.

        Extents that have arrived stay on the device.
        """
        moving = [(group, group.transfer) for group in self._groups(place) if group.transfer]
        for _, transfer in moving:
            transfer.cancel()  # all before any wait, else the next transfer would start meanwhile
        for group, transfer in moving:
            num_copied = transfer.stop()
            is_on_device = place is Place.LEAVING or num_copied == transfer.num_bytes
            self._drop(self._settle_at(group, Place.DEVICE if is_on_device else Place.HOST))

    def discard_dead(self) -> None:
        """Hold the blocks of offloaded extents that ended requests have freed.

        Frees offloaded extents that no request needs; an extent in transfer is freed after the
        transfer.
        """
        groups = {
            self._offloaded[extent]: None for extent in sorted(self.index.take_freed_offloaded())
        }
        for group in groups:
            wanted = [block for block in group.blocks if block not in group.held]
            self._hold(group, set(wanted) - set(self._engine().live(wanted)))
            if group.transfer is None and self._is_dead(group):
                self._release(group)

    def close(self) -> None:
        """Stop transfers, free host slots and the address range; the engine must be gone."""
        for export in self._exports:  # finished, not stopped: other workers wait for the bytes
            with contextlib.suppress(Exception):
                export.transfer.wait()
            if export.slot is not None:
                export.slot.free()
        self._exports.clear()
        for group in self._groups():
            if group.transfer is not None:
                group.transfer.stop()
            group.slot.free()
        self._offloaded.clear()
        self._all_groups.clear()
        self._moving.clear()
        self._busy.pop(self, None)
        self.address_range.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the address range disagree."""
        self.address_range.check_integrity()
        self.index.check(self._engine().live(self._real(range(self.geometry.num_blocks))))
        self._check_counters()
        assert (self in self._busy) == bool(self._moving or self._exports)
        assert set(self._offloaded) == {
            extent for place in OFFLOADED for extent in self.index.extents(place)
        }
        mapped = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)
        extents = [extent for place in mapped for extent in self.index.extents(place)]
        assert len(self.geometry.uses(extents)) == self.address_range.num_mapped
        for group in self._groups():
            [place] = {self.index.place(extent) for extent in group.extents}
            assert group.place is place
            idle = set(self._real_of(group.extents)) - set(group.blocks)
            assert idle <= group.held, f"free blocks of {group.extents}, offloaded, are not held"
            assert self._engine().live(group.blocks) == group.blocks
            assert (group.transfer is None) == (place is Place.HOST)

    def settle_exports(self) -> None:
        """Release blocks whose copies to other devices have finished."""
        if not self._exports:
            return
        ended = [export for export in self._exports if export.transfer.has_ended]
        if ended:
            self._exports = [export for export in self._exports if export not in ended]
            self._note_busy()
            for export in ended:
                self._engine().give(export.blocks)
                if export.slot is not None:
                    export.slot.free()
            self.discard_dead()

    def _put(self, group: Group, place: Place) -> None:
        super()._put(group, place)
        self._note_busy()

    def _note_busy(self) -> None:
        if self._moving or self._exports:
            self._busy[self] = None
        else:
            self._busy.pop(self, None)

    def _finish(self, group: Group, transfer: Transfer) -> list[int]:
        is_leaving = group.place is Place.LEAVING
        try:
            transfer.wait()
        except BaseException:
            self._drop(self._settle_at(group, Place.DEVICE if is_leaving else Place.HOST))
            raise
        return self._settle_at(group, Place.HOST if is_leaving else Place.DEVICE)

    def _settle_at(self, group: Group, place: Place) -> list[int]:
        """Record that a whole group is on the device, or only on the host.

        Returns the extents whose pages to drop.
        """
        group.transfer = None
        if place is Place.DEVICE and group.place is Place.ARRIVING:
            self.arrived_bytes += group.slot.num_bytes
        self._put(group, place)
        if place is Place.HOST:
            if self._is_dead(group):
                self._release(group)
            return group.extents
        group.slot.free()
        self._engine().give(sorted(group.held))
        return []

    def _release(self, group: Group) -> None:
        self._put(group, Place.UNMAPPED)
        group.slot.free()

    def _hold(self, group: Group, blocks: set[int]) -> None:
        self._engine().hold(sorted(blocks))
        group.held |= blocks

    def _retain(self, extents: list[int], *, is_filled: bool) -> list[range]:
        held: list[range] = []
        fresh: list[range] = []
        try:
            for span in self.geometry.spans(extents):
                fresh += self.address_range.retain(span, is_filled=is_filled)
                held.append(span)
        except BaseException:
            for span in held:
                self.address_range.drop(span)
            raise
        return fresh

    def _drop(self, extents: list[int]) -> None:
        self.address_range.drop_each(self.geometry.spans(extents))

    def _pieces(self, group: Group) -> Iterator[tuple[int, int, int]]:
        """Yield ``(device address, host address, num_bytes)`` of a group's bytes, row by row."""
        extents = self.geometry.extents(group.blocks)
        return group.slot.beside((self.address + offset, size) for offset, size in extents)
