"""Residency of models' bytes on the device: switches, eviction, KV pages."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from gpupoold.memory.device import Device, Direction, Fence
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.pages import OutOfPages, PagePool
from gpupoold.memory.transfers import Transfer, TransferQueue
from gpupoold.wire.messages import SwitchRecord
from gpupoold.worker.kv.page_eviction import PageEviction, Use, WeightLoads, spare_extents

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine

# A second piece of a prefetch is queued, so that the link is busy between two steps.
_MAX_PREFETCH_PIECES = 2
# Growth of a model's KV during a turn: some 200 tokens with contexts of about a thousand.
_GROWTH_SHARE = 0.25

# Bytes of KV mapped in a step before they are needed: later steps need not look for blocks.
_AHEAD_BYTES = 4 << 20


class Residency:
    """The bytes of each model on the device, for one thread; a running turn keeps its pages.

    Two queues copy KV in and out while engines compute; ``advance`` continues the copies between
    two steps.
    """

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        host: KvHostCache,
        bandwidth_bytes_per_s: float,
        use_of: Callable[[str], Use],
        device_number: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._device_number = device_number
        self._clock = clock
        self.pool = pool
        self._host = host
        self._in = TransferQueue.open(device, Direction.IN, "copy-in")
        self._out = TransferQueue.open(device, Direction.OUT, "copy-out")
        self.eviction = PageEviction(device, pool, host, self._out, use_of, clock)
        self._models = self.eviction.models
        self._next: str | None = None  # being prefetched
        self._last_uses = LastUses(device)
        self._had_before_bytes = 0  # weights mapped before
        self.loads = WeightLoads(device, self.eviction, self._in, bandwidth_bytes_per_s, clock)

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of weights that a prefetch has loaded or is loading for a coming turn."""
        if self._next is None:
            return 0
        return max(0, self._models[self._next].weights.mapped_bytes - self._had_before_bytes)

    def add(self, model: ModelEngine) -> None:
        """Add a model, whose pages this object then manages."""
        self.eviction.add(model)
        self._last_uses.add(model)

    def vacate(self, name: str) -> None:
        """Remove a model, whose engine another model will take over."""
        model = self._models[name]
        self._last_uses.pause(model)
        model.vacate()
        self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a model, whose memory the caller frees."""
        if self._next == name:
            self.stop_prefetch()
        self._last_uses.remove(self._models[name])
        self.eviction.remove(name)

    def close(self) -> None:
        """End the copying threads; other objects free the models' memory."""
        self.stop_prefetch()
        self._in.close()
        self._out.close()

    def missing_bytes(self, name: str) -> int:
        """Return the bytes to move to make the model resident now."""
        model = self._models[name]
        return model.weights.missing_bytes + model.kv.missing_bytes

    def switch_in(self, name: str, previous: str | None = None) -> SwitchRecord | None:
        """Make a model ready to run after ``previous``, evicting other models as needed.

        Returns None if no work was needed.

        Afterwards the weights are resident, and the KV of one request, if any; ``advance`` brings
        in further KV. If the model may start early and all its KV is present, weights may still
        arrive, for which the next step waits.

        Raises:
            OutOfPages: the model does not fit even alone.
        """
        model, at, began_s = self._models[name], time.time(), self._clock()
        self._last_uses.run(model)
        if self._next != name:
            self.stop_prefetch()
        prefetched_bytes, self._next = self.prefetched_bytes, None
        model.kv.settle()
        model.kv.stop(Place.LEAVING)
        model.weights.settle()
        self._find_prefixes(model)
        first = self._first_extent(model)
        is_resident = model.weights.can_start and model.kv.is_whole and not first
        if is_resident and not prefetched_bytes:
            return None
        record = SwitchRecord(
            at=at,
            device=self._device_number,
            model=name,
            previous=previous,
            at_s=began_s,
            prefetched_bytes=prefetched_bytes,
        )
        if is_resident:
            return replace(record, late_weight_bytes=model.weights.arriving_bytes)
        arrived_bytes = model.kv.arrived_bytes
        started_s = self._clock()
        moved = self.eviction.free_pages(self._num_wanted_pages(model), {name})
        record = replace(record, evict_s=self._clock() - started_s, kv_out_bytes=moved)
        starts_early = model.kv.is_whole and model.weights.start_bytes < model.weights.num_bytes
        bring = self.loads.begin if starts_early else self.loads.load
        record = bring(model, record)
        started_s = self._clock()
        if first:
            if not self.eviction.wait_for(model.kv.num_missing_pages(first)):
                raise OutOfPages(f"{model.name} has no page for its first block")
            model.kv.map(first)
        self.wait_ready(name)
        kv_s = self._clock() - started_s
        return replace(
            record,
            total_s=record.evict_s + record.map_s + record.weights_s + kv_s,
            kv_s=kv_s,
            kv_in_bytes=model.kv.arrived_bytes - arrived_bytes,
            late_weight_bytes=model.weights.arriving_bytes,
        )

    def make_resident(self, name: str) -> None:
        """Make a model ready to run, with all its weights present and all its KV."""
        self.switch_in(name)
        self.bring_all(name)

    def has_room(self, name: str) -> bool:
        """Return whether a model could have pages to run, if all other models were evicted.

        A model may have no room while a load has pages.
        """
        model = self._models[name]
        first = model.kv.num_missing_pages(self._first_extent(model))
        needed = model.weights.num_missing_pages + first
        return needed <= self.eviction.num_pages_besides({name})

    def can_step(self, name: str) -> bool:
        """Return whether a model could step now, if some of its KV were on the device."""
        model = self._models[name]
        return model.weights.can_start and not self._first_extent(model)

    def begin_use(self, name: str) -> bool:
        """Let a model run on dummy requests; return False if its weights are not on the device.

        Takes no page from another model, but a free one for the null block.
        """
        model = self._models[name]
        first = self._first_extent(model)
        if not model.weights.is_resident or (
            model.kv.num_missing_pages(first) > self.pool.num_free
        ):
            return False
        self._last_uses.run(model)
        if first:
            model.kv.map(first)
        return True

    def advance(self, name: str) -> None:
        """Start to load more of a model's KV, then of the prefetched model; call between steps.

        KV of requests that have ended begins to be saved for later requests.
        """
        self.eviction.settle()
        model = self._models[name]
        self.save_prefixes(name)
        self._find_prefixes(model)
        if model.kv.missing_bytes:
            self._bring(model)
            if not self._is_coming(model):
                self.eviction.give_up(model)  # no KV can arrive any more
        elif self._next is not None:
            self._go_on_prefetching(self._next, name)

    def wait_ready(self, name: str) -> None:
        """Return when a step of the model would do work, or all its KV has arrived."""
        model = self._models[name]
        self._bring(model)
        while not model.kv.is_whole and not model.is_ready():
            if not self._wait_arrival(model):
                self.eviction.give_up(model)  # no KV can arrive any more
            self._bring(model)

    def bring_all(self, name: str) -> None:
        """Return when all weights and all KV of the present model have arrived."""
        model = self._models[name]
        model.weights.wait()
        self._bring(model)
        while not model.kv.is_whole and self._wait_arrival(model):
            self._bring(model)

    def prefetch(self, name: str, current: str) -> None:
        """Start to bring in a model while ``current`` runs; return at once.

        Takes no page of the current model or for its expected growth of KV. Other models are
        evicted as at the switch; or, if both models fit together, as far as needed for the whole
        model, because the turn then hides the copy. Stops a prefetch of another model.
        """
        if name == self._next:
            return
        self.stop_prefetch()
        model = self._models[name]
        model.kv.stop(Place.LEAVING)
        self._find_prefixes(model)
        self._next, self._had_before_bytes = name, model.weights.mapped_bytes
        wanted = self._num_wanted_pages(model)
        if wanted:
            growth = self._growth_pages(self._models[current].kv)
            keep = {name}
            if wanted + growth <= self.eviction.num_pages_besides({name, current}):
                keep.add(current)
            self.eviction.free_pages(wanted + growth, keep, untouched=current)
            self._go_on_prefetching(name, current)

    def stop_prefetch(self) -> None:
        """Stop the prefetch after a change of plan; bytes that have arrived stay."""
        if self._next is None:
            return
        model, self._next = self._models[self._next], None
        model.weights.stop()
        model.kv.stop(Place.ARRIVING)
        self.eviction.stop_leaving()

    def bind_piece(self, name: str) -> bool:
        """Map a piece of weights that have stayed on the device; return whether more follows."""
        model = self._models[name]
        return model.weights.bind(model.weights_id, self.loads.pages_per_piece)

    def load_piece(self, name: str, current: str | None) -> bool:
        """Load a piece of weights, without pages of ``current``; return whether more can follow."""
        weights = self._models[name].weights
        missing = weights.num_missing_pages
        if (wanted := min(missing, self.loads.pages_per_load)) > self.pool.num_free:
            self.eviction.free_pages(wanted, {name}, untouched=current)
            self.eviction.wait_for(wanted)
        weights.load(min(wanted, self.pool.num_free))
        return 0 < weights.num_missing_pages < missing

    def unbound_bytes(self) -> dict[str, int]:
        """Return the bytes of weights that stay on the device without an engine, by model."""
        found = defaultdict[str, int](int)
        for owner, num_pages in self.pool.num_unbound().items():
            found[owner.model] += num_pages * self._device.page_bytes
        return dict(found)

    def forget_unbound(self, model: str) -> bool:
        """Give up weights that stay on the device without an engine; return whether there are."""
        owners = [owner for owner in self.pool.num_unbound() if owner.model == model]
        for owner in owners:
            self.pool.forget(owner)
        return bool(owners)

    def free_pages(self, num_pages: int) -> None:
        """Evict from any model until ``num_pages`` are free or no page can be evicted."""
        self.eviction.free_pages(num_pages, set())
        self.eviction.wait_for(num_pages)

    def page_out(self, name: str) -> int:
        """Evict all of a model from the device; return the bytes of KV copied to the host."""
        model = self._models[name]
        if self._next == name:
            self.stop_prefetch()
        self._last_uses.pause(model)
        self.save_prefixes(name)
        model.kv.stop(Place.ARRIVING)
        model.kv.finish_exports()
        model.kv.unmap(model.kv.index.idle())
        before = model.kv.host_bytes
        for group in model.kv.cut(model.kv.index.extents(Place.DEVICE)):
            model.kv.begin_page_out(group, self._out)
        model.kv.finish(Place.LEAVING)
        model.weights.evict()
        return model.kv.host_bytes - before

    def ensure_kv(self, name: str) -> None:
        """Map as many blocks as the next step may need, or as many as possible.

        Without a prefetch, also maps a few extents for later steps while pages are free. Without
        pages for more, prefixes of waiting requests give way to running requests, and the engine
        delays or preempts requests, which is slower but never wrong.
        """
        model = self._models[name]
        self._last_uses.run(model)  # also for a step outside of a turn
        missing, soon = model.num_missing_blocks()
        if not missing and not soon:
            return
        kv = model.kv
        # Offloaded KV comes back first: running requests could otherwise keep it out for ever.
        reserved = kv.num_returning_pages
        count = -(-missing // kv.geometry.blocks_per_extent)
        if missing and self.eviction.is_exhausted({model.name}):
            count = min(count, self.pool.num_free)  # an extent takes a page or more
            if not count:
                _make_way(model)
                return
        num_ahead = 0
        if self._next is None:  # few, as the step waits
            most = max(1, _AHEAD_BYTES // kv.geometry.extent_bytes)
            num_ahead = min(-(-soon // kv.geometry.blocks_per_extent), most)
        unmapped = kv.first_extents(Place.UNMAPPED, count + num_ahead)
        wanted = kv.num_missing_pages(unmapped[:count]) + reserved
        if missing and wanted > self.pool.num_free:
            self.eviction.try_to_free(wanted, {model.name})
            unmapped = unmapped[:count]
        if fitting := _fitting(kv, unmapped, self.pool.num_free - reserved):
            kv.map(fitting)
        elif missing:
            _make_way(model)

    def export(
        self, name: str, blocks: Sequence[int], on_end: Callable[[bool], None]
    ) -> tuple[HostSlot, Transfer] | None:
        """Copy blocks of a model to the host for another device, see :meth:`KvMemory.export`."""
        return self._models[name].kv.export(blocks, self._out, on_end)

    def save_prefixes(self, name: str) -> None:
        """Start to copy KV of a model's ended requests to the host, for later requests."""
        prefixes = self._models[name].prefixes
        if prefixes is not None and prefixes.has_ended:
            prefixes.save(self._out)

    def check_integrity(self, sent_bytes: int = 0, *, is_loading: bool = False) -> int:
        """Raise AssertionError when pool, page tables, extents and host slots disagree.

        ``sent_bytes`` is host memory in KV transfers to other workers. A load, if one is under way,
        may have pages too. Returns the number of pages that models own.
        """
        self.pool.check_integrity()
        self._host.slabs.check_integrity()
        owned: list[int] = []
        for model in self._models.values():
            model.kv.check_integrity()
            owned += model.kv.address_range.physical_pages
            owned += model.weights.address_range.physical_pages
        if not is_loading:
            self.pool.check_owned(owned)
        kvs = [model.kv for model in self._models.values()]
        own_bytes = sum(kv.host_bytes - kv.peer_host_bytes for kv in kvs)
        if self._host.prefixes is not None:
            self._host.prefixes.check_integrity()
        assert self._host.used_bytes == own_bytes + sent_bytes + self._host.prefix_bytes
        return len(owned)

    def _find_prefixes(self, model: ModelEngine) -> None:
        if model.prefixes is not None:
            model.prefixes.attach_postponed()

    def _bring(self, model: ModelEngine, keep_free: int | None = None) -> None:
        """Start to restore KV in the order of need, until the queue is full.

        With ``keep_free``, that many pages stay free; without, other models are evicted.
        """
        if not model.kv.missing_bytes or not self._in.has_room:
            return
        room_bytes, num_pages, ready = self._in.room_bytes, 0, list[int]()
        # During a copy by the host's cores mapping is ten times slower: all is mapped before.
        maps_first = self._device.is_host_addressable
        for group in model.kv.groups_on_host(chain([0], model.wanted_blocks())):
            num_pages += model.kv.num_missing_pages(group)
            if num_pages > self.pool.num_free and keep_free is None:
                model.kv.unmap(spare_extents(model.kv))
                self.eviction.free_pages(num_pages, {model.name})
            if num_pages + (keep_free or 0) > self.pool.num_free or room_bytes <= 0:
                break
            ready.append(group[0])
            room_bytes -= len(group) * model.kv.geometry.extent_bytes
            if not maps_first:
                model.kv.begin_page_in(ready, self._in)
                num_pages, ready = 0, []
        model.kv.begin_page_in(ready, self._in)

    def _is_coming(self, model: ModelEngine) -> bool:
        """Return whether running copies will bring a model's KV, or free pages for the KV."""
        leaving = self.eviction.oldest_leaving()
        arriving = model.kv.oldest_transfer(Place.ARRIVING)
        return bool(arriving or leaving) or not self._in.has_room

    def _wait_arrival(self, model: ModelEngine) -> bool:
        """Wait for a copy of a model's KV, or for pages; return False if no copy is running."""
        transfer = model.kv.oldest_transfer(Place.ARRIVING) or self.eviction.oldest_leaving()
        if transfer is None:
            return False
        transfer.wait()
        self.eviction.settle()
        return True

    def _go_on_prefetching(self, name: str, current: str) -> None:
        model = self._models[name]
        keep_free = self._growth_pages(self._models[current].kv)
        first = self._first_extent(model)
        if first and model.kv.num_missing_pages(first) + keep_free <= self.pool.num_free:
            model.kv.map(first)
        missing = model.weights.num_missing_pages
        if not missing:
            self._bring(model, keep_free)
            return
        model.weights.settle()
        if model.weights.num_arriving == _MAX_PREFETCH_PIECES:
            return
        count = min(missing, self.pool.num_free - keep_free, self.loads.pages_per_piece)
        # A piece is one transfer, so pieces are small only if no more pages become free.
        is_enough = count >= min(missing, self.loads.pages_per_load)
        if count > 0 and (is_enough or self.eviction.oldest_leaving() is None):
            model.weights.begin_load(self._in, count)

    def _first_extent(self, model: ModelEngine) -> list[int]:
        """Return extent 0 if unmapped: kernels may access the null block, block 0, at any time."""
        return [0] if model.kv.index.place(0) is Place.UNMAPPED else []

    def _num_wanted_pages(self, model: ModelEngine) -> int:
        first = model.kv.num_missing_pages(self._first_extent(model))
        return model.weights.num_missing_pages + model.kv.num_returning_pages + first

    def _growth_pages(self, kv: KvMemory) -> int:
        """Return a guess of the pages that a running model's KV may need during its turn."""
        resident = kv.resident_bytes // self._device.page_bytes
        return kv.geometry.extent_pages + int(_GROWTH_SHARE * resident)


class LastUses:
    """A fence per model, recorded when another model runs.

    The pages of a paused model are unmapped after the model's own last kernels, without a wait for
    the kernels of the running model.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: ModelEngine | None = None
        self._fences: dict[str, Fence] = {}

    def add(self, model: ModelEngine) -> None:
        """Add a model, which may launch kernels until another model runs."""
        self._fences[model.name] = self._device.open_fence()

    def remove(self, model: ModelEngine) -> None:
        """Remove a model."""
        _set(model, None)
        self._fences.pop(model.name).close()
        if self._running is model:
            self._running = None

    def run(self, model: ModelEngine) -> None:
        """Let ``model`` launch kernels; no other model launches any until its own ``run``."""
        before, self._running = self._running, model
        if before is model:
            return
        if before is not None:
            self._paused(before)
        _set(model, None)

    def pause(self, model: ModelEngine) -> None:
        """Record that ``model`` launches no kernels until its own ``run``."""
        if self._running is model:
            self._running = None
            self._paused(model)

    def _paused(self, model: ModelEngine) -> None:
        fence = self._fences[model.name]
        fence.record()
        _set(model, fence)


def _set(model: ModelEngine, last_use: Fence | None) -> None:
    model.kv.address_range.last_use = model.weights.address_range.last_use = last_use


def _make_way(model: ModelEngine) -> None:
    if model.prefixes is not None:
        model.prefixes.drop_if_short()


def _fitting(kv: KvMemory, extents: list[int], num_pages: int) -> list[int]:
    """Return the first of ``extents`` that ``num_pages`` are enough for."""
    counts = range(1, len(extents) + 1)  # the more extents, the more pages
    return extents[
        : bisect_right(counts, num_pages, key=lambda n: kv.num_missing_pages(extents[:n]))
    ]
