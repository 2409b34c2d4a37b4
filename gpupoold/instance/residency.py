"""Which models' bytes are on the device: switching, making room, giving KV pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from gpupoold.memory.contracts import Device, OutOfPages
from gpupoold.memory.host import HostBuffer, KvHostCache
from gpupoold.memory.kv import KvMemory, Place
from gpupoold.memory.pages import PagePool
from gpupoold.memory.regions import Region
from gpupoold.memory.transfers import TransferQueue
from gpupoold.memory.weights import WeightMemory
from gpupoold.scheduling.eviction import Eviction, Holding, Victim, plan_evictions

_BANDWIDTH_SMOOTHING = 0.2
_MIN_BYTES_FOR_BANDWIDTH = 1 << 20
# What a turn adds to its model's KV: some 200 tokens to contexts of about a thousand.
_GROWTH_SHARE = 0.25


class PooledModel(Protocol):
    """What residency needs of a model's engine."""

    weights: WeightMemory
    kv: KvMemory

    @property
    def name(self) -> str:
        """The model's name."""

    def preempt(self) -> None:
        """Drop the KV of all requests, to be recomputed."""

    def num_missing_blocks(self) -> int:
        """Blocks the next step may want beyond the free ones."""


@dataclass(frozen=True, slots=True)
class SwitchStages:
    """Where a switch's time went; bytes are what moved."""

    evict_s: float = 0.0
    map_s: float = 0.0
    weights_s: float = 0.0
    kv_s: float = 0.0
    weight_bytes: int = 0
    kv_in_bytes: int = 0
    kv_out_bytes: int = 0

    @property
    def total_s(self) -> float:
        """All stages."""
        return self.evict_s + self.map_s + self.weights_s + self.kv_s


@dataclass(frozen=True, slots=True)
class Use:
    """What the scheduler knows about a model, for the order of eviction."""

    num_live: int
    last_used_s: float
    ttft_s: float
    next_deadline_s: float


class Residency:
    """The device's pages among its models. One thread; a running turn is never evicted under."""

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        host: KvHostCache,
        bandwidth_bytes_per_s: float,
        use_of: Callable[[str], Use],
    ) -> None:
        self._device = device
        self.pool = pool
        self._host = host
        self._use_of = use_of
        self._models: dict[str, PooledModel] = {}
        self._lane = device.open_lane()
        self._transfers = TransferQueue(self._lane.copy_in, "copy-in")
        self._prefetching: str | None = None
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s

    def add(self, model: PooledModel) -> None:
        """A model to look after."""
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        """A model's memory is going to be given back."""
        if self._prefetching == name:
            self.stop_prefetch()
        del self._models[name]

    def close(self) -> None:
        """End the thread that copies; the models' memory is given back by others."""
        self.stop_prefetch()
        self._transfers.close()
        self._lane.close()

    def missing_bytes(self, name: str) -> int:
        """Bytes that must move to make the model resident now."""
        model = self._models[name]
        return model.weights.missing_bytes + model.kv.host_bytes

    def total_bytes(self, name: str) -> int:
        """Bytes that must move when nothing of the model is resident."""
        model = self._models[name]
        return model.weights.num_bytes + model.kv.host_bytes + model.kv.resident_bytes

    def switch_in(self, name: str) -> SwitchStages | None:
        """Make a model resident, evicting others as needed; None when it already was.

        Raises:
            OutOfPages: the model does not fit even alone.
        """
        model = self._models[name]
        paged_out = model.kv.chunks(Place.HOST)
        # Kernels may touch the null block, block 0, whichever blocks are in use.
        first = [0] if 0 in model.kv.chunks(Place.UNBACKED) else []
        if model.weights.is_resident and not paged_out and not first:
            return None
        wanted = model.weights.num_missing_pages
        wanted += model.kv.num_missing_pages(list({*paged_out, *first}))
        stages = self._make_room(wanted, {name})
        waited_from_s = time.monotonic()
        model.weights.wait()
        before = replace(self._device.spent)
        started_s = time.monotonic()
        weight_bytes = model.weights.load()
        loaded_s = time.monotonic()
        map_s = (loaded_s - started_s) * self._device.spent.map_share_since(before)
        kv_bytes = sum(model.kv.page_in(chunk) for chunk in paged_out)
        model.kv.back(first)
        stages = replace(
            stages,
            map_s=map_s,
            weights_s=loaded_s - waited_from_s - map_s,
            kv_s=time.monotonic() - loaded_s,
            weight_bytes=weight_bytes,
            kv_in_bytes=kv_bytes,
        )
        self._learn_bandwidth(weight_bytes, loaded_s - started_s)
        return stages

    def prefetch(self, name: str, current: str) -> None:
        """Begin to bring in a model's weights while ``current`` runs; returns at once.

        As many pages as there is room for without touching the current model, what its KV
        may grow by, or anything that would have to be copied out. Whatever was being
        prefetched for another model is stopped.
        """
        model = self._models[name]
        if name == self._prefetching and model.weights.is_arriving:
            return
        self.stop_prefetch()
        wanted = model.weights.num_missing_pages
        if not wanted:
            return
        growth = self._growth_pages(self._models[current].kv)
        self._make_room(wanted + growth, {name, current}, may_move=False)
        count = min(wanted, self.pool.num_free - growth)
        if count > 0:
            model.weights.begin_load(self._transfers, count)
            self._prefetching = name

    def stop_prefetch(self) -> None:
        """Plans have changed: end what is on its way; what has arrived stays."""
        if self._prefetching is not None:
            self._models[self._prefetching].weights.stop()
            self._prefetching = None

    def make_room(self, num_pages: int) -> None:
        """Evict, whichever the model, until ``num_pages`` are free or nothing is left to evict."""
        self._make_room(num_pages, set())

    def ensure_kv(self, name: str) -> None:
        """Back as many blocks as the next step may want, or as many as can be had.

        When pages are short the engine keeps requests waiting or preempts by
        itself; that is slower, never wrong.
        """
        model = self._models[name]
        missing = model.num_missing_blocks()
        if not missing:
            return
        unbacked = model.kv.chunks(Place.UNBACKED)
        count = -(-missing // model.kv.geometry.blocks_per_chunk)
        for chunk in unbacked[:count]:
            wanted = model.kv.num_missing_pages([chunk])
            if wanted > self.pool.num_free:
                self._make_room(wanted, {name})
            if wanted > self.pool.num_free:
                return
            model.kv.back([chunk])

    def check_integrity(self) -> None:
        """Raise AssertionError when pool, regions and chunks disagree."""
        self.pool.check_integrity()
        self._host.check_integrity()
        owned = 0
        for model in self._models.values():
            model.kv.check_integrity()
            owned += model.kv.resident_bytes // self._device.page_bytes
            owned += model.weights.num_mapped_pages
        assert owned == self.pool.num_pages - self.pool.num_free

    def _make_room(self, num_pages: int, keep: set[str], *, may_move: bool = True) -> SwitchStages:
        """Free pages of models not in ``keep`` until ``num_pages`` are free, if possible."""
        started_s = time.monotonic()
        moved = 0
        while (short := num_pages - self.pool.num_free) > 0:
            holdings = [self._holding(n) for n in self._models if n not in keep]
            before = self.pool.num_free
            for eviction in plan_evictions(short, holdings, may_move=may_move):
                if self.pool.num_free >= num_pages:
                    break
                moved += self._evict(eviction, num_pages)
            if self.pool.num_free == before:
                break  # sizes were estimates: go round until nothing more comes free
        return SwitchStages(evict_s=time.monotonic() - started_s, kv_out_bytes=moved)

    def _growth_pages(self, kv: KvMemory) -> int:
        """Pages that a running model's KV may want during its turn: a guess."""
        chunk_pages = sum(len(span) for span in kv.geometry.pages(0))
        resident = kv.resident_bytes // self._device.page_bytes
        return chunk_pages + int(_GROWTH_SHARE * resident)

    def _holding(self, name: str) -> Holding:
        model, use = self._models[name], self._use_of(name)
        free = model.kv.num_resident_pages(model.kv.free_chunks())
        total = model.kv.resident_bytes // self._device.page_bytes
        return Holding(
            model=name,
            num_live=use.num_live,
            last_used_s=use.last_used_s,
            ttft_s=use.ttft_s,
            next_deadline_s=use.next_deadline_s,
            weight_pages=model.weights.num_mapped_pages,
            free_kv_pages=free,
            live_kv_pages=total - free,
        )

    def _evict(self, eviction: Eviction, num_pages: int) -> int:
        """Carry an eviction out as far as needed; returns KV bytes moved to the host."""
        model = self._models[eviction.model]
        if eviction.victim is Victim.WEIGHTS:
            # Only as much as is needed: the rest need not come in again.
            model.weights.evict(num_pages - self.pool.num_free)
            return 0
        if eviction.victim is Victim.FREE_KV:
            for chunk in model.kv.free_chunks():
                if self.pool.num_free >= num_pages:
                    break
                model.kv.unback([chunk])
            return 0
        return self._page_out(model, num_pages)

    def _page_out(self, model: PooledModel, num_pages: int) -> int:
        moved = 0
        for chunk in reversed(model.kv.chunks(Place.DEVICE)):
            if self.pool.num_free >= num_pages:
                return moved
            try:
                moved += model.kv.page_out(chunk)
            except OutOfPages:
                # The host cache is full: these requests lose their KV, not their tokens.
                self._recompute_later(model)
                return moved
        return moved

    def _recompute_later(self, model: PooledModel) -> None:
        model.preempt()
        model.kv.discard_dead()
        model.kv.unback(model.kv.free_chunks())

    def _learn_bandwidth(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < _MIN_BYTES_FOR_BANDWIDTH or seconds <= 0:
            return
        measured = num_bytes / seconds
        change = measured - self.bandwidth_bytes_per_s
        self.bandwidth_bytes_per_s += _BANDWIDTH_SMOOTHING * change


def measure_bandwidth(device: Device, pool: PagePool) -> float:
    """Bytes per second of mapping and filling pages from warm host memory, best of three."""
    num_pages = min(pool.num_free, max(1, (32 << 20) // device.page_bytes))
    source = HostBuffer.create("gpupool-probe", num_pages * device.page_bytes)
    device.pin(source.address, source.num_bytes)
    region = Region(device, pool, num_pages)
    best_s = float("inf")
    for _ in range(3):
        started_s = time.perf_counter()
        region.retain(range(num_pages), source.address)
        device.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
        region.drop(range(num_pages))
    region.close()
    device.unpin(source.address, source.num_bytes)
    source.close()
    return num_pages * device.page_bytes / best_s
