"""Page eviction, at once or after copies to the host, and loads of weights into the pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from gpupoold.memory.device import Device
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import Place
from gpupoold.memory.pages import OutOfPages, PagePool
from gpupoold.memory.transfers import BATCH_BYTES, Transfer, TransferQueue
from gpupoold.scheduling.eviction import Eviction, PageHolding, Victim, plan_evictions
from gpupoold.wire.messages import SwitchRecord

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine


# Weight of a load in the mean: less for a load too small to overlap mapping and copying.
_BANDWIDTH_SMOOTHING = 0.2
# Bytes mapped at a time for copies beside steps or further mappings. The running model waits for
# the mapping: on a GPU 1.3 ms for 5 ms of copying.
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Use:
    """The scheduler's data about a model, for the order of eviction."""

    num_live: int
    last_used_s: float
    ttft_s: float
    next_deadline_s: float


@dataclass(eq=False, slots=True)
class PageEviction:
    """Evicts pages of a device's models; ``out`` copies KV to the host while engines compute."""

    device: Device
    pool: PagePool
    host: KvHostCache
    out: TransferQueue
    use_of: Callable[[str], Use]
    clock: Callable[[], float]
    models: dict[str, ModelEngine] = field(default_factory=dict, init=False)
    num_recomputed: int = field(default=0, init=False)
    _busy: dict[KvMemory, None] = field(default_factory=dict, init=False)
    """With copies in progress."""
    _fruitless: tuple[set[str], int, int] | None = field(default=None, init=False)

    def add(self, model: ModelEngine) -> None:
        """Add a model whose pages may be evicted."""
        self.models[model.name] = model
        model.kv.join(self._busy)
        self._fruitless = None

    def remove(self, name: str) -> None:
        """Remove a model."""
        self.models.pop(name).kv.join({})
        self._fruitless = None

    def settle(self) -> None:
        """Process every KV transfer that has ended."""
        for kv in list(self._busy):
            kv.settle()

    def settle_exports(self) -> None:
        """Free exports of all models whose copies have ended."""
        for kv in list(self._busy):
            kv.settle_exports()

    def stop_leaving(self) -> None:
        """Stop all copies to the host in progress; the extents stay on the device."""
        for kv in list(self._busy):
            kv.stop(Place.LEAVING)

    def try_to_free(self, num_pages: int, keep: set[str]) -> None:
        """Free ``num_pages`` as ``free_pages`` does, and wait for the pages.

        Does nothing if fewer pages became free in the last call and nothing has changed since: a
        plan looks at all models.
        """
        if self.is_exhausted(keep):
            return
        self.free_pages(num_pages, keep)
        self._fruitless = None if self.wait_for(num_pages) else self._state(keep)

    def is_exhausted(self, keep: set[str]) -> bool:
        """Return whether the last ``try_to_free`` failed and nothing has changed since."""
        return self._fruitless is not None and self._fruitless == self._state(keep)

    def _state(self, keep: set[str]) -> tuple[set[str], int, int]:
        """Return numbers that change whenever another plan may free more pages."""
        kvs = (model.kv for name, model in self.models.items() if name not in keep)
        return keep, self.pool.version, sum(kv.index.version for kv in kvs)

    def free_pages(self, num_pages: int, keep: set[str], *, untouched: str | None = None) -> int:
        """Free ``num_pages`` if possible, at once or after copies, except of models in ``keep``.

        With ``untouched``, the plan counts the evictions of that model as if made, and drops no KV
        that would be recomputed. Returns the bytes of KV being copied to the host.
        """
        moved = 0
        is_host_full = False
        while (short := num_pages - self.num_coming_pages) > 0:
            holdings = [self._holding(n, is_host_full) for n in self.models if n not in keep]
            before = self.num_coming_pages
            for eviction in plan_evictions(short, holdings):
                short = num_pages - self.num_coming_pages
                if short <= 0:
                    break
                recomputes = eviction.victim is Victim.RECOMPUTE
                if untouched is None or not (recomputes or eviction.model == untouched):
                    moved += self._evict(eviction, short)
            # Sizes are estimates, so repeat until no more pages become free.
            if self.num_coming_pages == before:
                if is_host_full:
                    break
                is_host_full = True
        return moved

    def wait_for(self, num_pages: int) -> bool:
        """Wait for pages of running copies; return whether ``num_pages`` are free."""
        while self.pool.num_free < num_pages:
            transfer = self.oldest_leaving()
            if transfer is None:
                return False
            transfer.wait()
            self.settle()
        return True

    def oldest_leaving(self) -> Transfer | None:
        """Return the oldest running transfer to the host of the first model with any."""
        transfers = (kv.oldest_transfer(Place.LEAVING) for kv in self._busy)
        return next((transfer for transfer in transfers if transfer is not None), None)

    @property
    def num_coming_pages(self) -> int:
        """Number of free pages, including those that running copies will free."""
        return self.pool.num_free + sum(kv.num_leaving_pages for kv in self._busy)

    def num_pages_besides(self, names: set[str]) -> int:
        """Return the number of pages that are free or of other models."""
        others = (model for name, model in self.models.items() if name not in names)
        held_bytes = sum(other.weights.mapped_bytes + other.kv.resident_bytes for other in others)
        return self.pool.num_free + held_bytes // self.device.page_bytes

    def recompute_later(self, model: ModelEngine) -> None:
        """Drop the KV of a model's requests; the KV is recomputed from the requests' tokens."""
        self.num_recomputed += 1
        model.kv.stop(Place.LEAVING)
        model.kv.stop(Place.ARRIVING)
        model.preempt()
        model.kv.discard_dead()
        model.kv.unmap(spare_extents(model.kv))

    def give_up(self, model: ModelEngine) -> None:
        """Drop KV of the host that cannot arrive: that of waiting requests, or else all."""
        model.kv.stop(Place.ARRIVING)
        if model.prefixes is None or not model.prefixes.drop():
            self.recompute_later(model)
        else:
            model.kv.discard_dead()

    def _holding(self, name: str, is_host_full: bool) -> PageHolding:
        model, use = self.models[name], self.use_of(name)
        kv = model.kv
        free = kv.num_idle_pages
        live = kv.resident_bytes // self.device.page_bytes - kv.num_leaving_pages - free
        return PageHolding(
            model=name,
            num_live=use.num_live,
            idle_s=self.clock() - use.last_used_s,
            ttft_s=use.ttft_s,
            next_deadline_s=use.next_deadline_s,
            weight_pages=model.weights.num_mapped_pages,
            free_kv_pages=free,
            live_kv_pages=live,
            movable_kv_pages=0 if is_host_full else self._num_movable(kv, live),
        )

    def _num_movable(self, kv: KvMemory, live_pages: int) -> int:
        """Return the number of live KV pages whose blocks fit into the host cache now."""
        live_blocks = kv.index.num_used_on_device
        room = self.host.num_free_blocks(kv.geometry.block_bytes)
        return live_pages if room >= live_blocks else live_pages * room // live_blocks

    def _evict(self, eviction: Eviction, short: int) -> int:
        """Evict until ``short`` more pages are free, or will be free after running copies.

        Returns the bytes of KV being copied to the host.
        """
        model = self.models[eviction.model]
        match eviction.victim:
            case Victim.WEIGHTS:
                # No more than needed: remaining weights need not be loaded again.
                model.weights.evict(short)
            case Victim.FREE_KV:
                enough = self.pool.num_free + short
                for extent in model.kv.index.idle():
                    if self.pool.num_free >= enough:
                        break
                    model.kv.unmap([extent])
            case Victim.RECOMPUTE:
                self.recompute_later(model)
            case Victim.LIVE_KV:
                return self._page_out(model, short)
        return 0

    def _page_out(self, model: ModelEngine, short: int) -> int:
        model.kv.stop(Place.ARRIVING)
        before = model.kv.host_bytes
        # From the end of the order of need: the first requests after the next switch keep KV
        # longest.
        extents = model.kv.extents_in_order(Place.DEVICE, chain([0], model.wanted_blocks()))
        for group in model.kv.cut(extents[::-1]):
            leaving = _enough(model.kv, group, short)
            # Too few where extents share pages: then ``make`` plans again.
            short -= model.kv.num_resident_pages(leaving)
            if model.kv.begin_page_out(leaving, self.out) < len(leaving) or short <= 0:
                break  # the host cache is full, or enough pages become free
        return model.kv.host_bytes - before


def spare_extents(kv: KvMemory) -> list[int]:
    """Return the free extents of a running model, except the null block's extent.

    Kernels access the null block at any time.
    """
    return [extent for extent in kv.index.idle() if extent]


def _enough(kv: KvMemory, extents: list[int], num_pages: int) -> list[int]:
    """Return the first of ``extents`` that free ``num_pages`` together, or all."""
    for count in range(1, len(extents)):
        if kv.num_resident_pages(extents[:count]) >= num_pages:
            return extents[:count]
    return extents


@dataclass(eq=False, slots=True)
class WeightLoads:
    """Brings in the missing weights of a model, in as many pieces as pages become free."""

    device: Device
    eviction: PageEviction
    copies_in: TransferQueue
    bandwidth_bytes_per_s: float
    """Bandwidth of switches including mapping: as measured before, then by each switch."""
    clock: Callable[[], float]

    @property
    def pages_per_load(self) -> int:
        """The fewest pages that are loaded at a time, unless fewer are missing."""
        return max(1, BATCH_BYTES // self.device.page_bytes)

    @property
    def pages_per_piece(self) -> int:
        """The most pages that are mapped at a time beside copies or steps."""
        return max(1, _PIECE_BYTES // self.device.page_bytes)

    def load(self, model: ModelEngine, record: SwitchRecord) -> SwitchRecord:
        """Return when all weights are present, with the times and bytes added to ``record``.

        Raises:
            OutOfPages: no page can become free.
        """
        started_s = self.clock()
        model.weights.wait()
        waited_s = self.clock() - started_s  # for copies started earlier
        weights_s, evict_s, map_s = waited_s, record.evict_s, 0.0
        num_bytes = 0
        while model.weights.num_missing_pages:
            waited_from_s = self.clock()
            num_pages = self._wait_for_pages(model)
            before, started_s = replace(self.device.spent), self.clock()
            num_bytes += model.weights.load(num_pages)
            if not model.weights.num_missing_pages:
                self.device.wait_for_ranks()
            took_s = self.clock() - started_s
            mapping_s = took_s * self.device.spent.map_share_since(before)
            evict_s += started_s - waited_from_s
            weights_s += took_s - mapping_s
            map_s += mapping_s
        if not model.weights.is_far:
            self._learn_bandwidth(num_bytes, weights_s - waited_s + map_s)
        return replace(
            record, evict_s=evict_s, map_s=map_s, weights_s=weights_s, weight_bytes=num_bytes
        )

    def begin(self, model: ModelEngine, record: SwitchRecord) -> SwitchRecord:
        """Return when the model may start, with the times and bytes added to ``record``.

        All pages are mapped then, each piece beside the copies of the piece before.

        Raises:
            OutOfPages: no page can become free.
        """
        weights, evict_s, map_s = model.weights, record.evict_s, 0.0
        num_bytes, present_bytes = weights.missing_bytes, weights.present_bytes
        has_waited = weights.num_missing_pages > self.eviction.pool.num_free
        while weights.num_missing_pages:
            waited_from_s = self.clock()
            num_pages = min(self._wait_for_pages(model), self.pages_per_piece)
            started_s = self.clock()
            weights.begin_load(self.copies_in, num_pages)
            evict_s += started_s - waited_from_s
            map_s += self.clock() - started_s
        started_s = self.clock()
        weights.wait_for(weights.start_bytes)
        weights_s = self.clock() - started_s
        if not has_waited and not model.weights.is_far:  # else copies have overlapped the waiting
            self._learn_bandwidth(weights.present_bytes - present_bytes, map_s + weights_s)
        return replace(
            record, evict_s=evict_s, map_s=map_s, weights_s=weights_s, weight_bytes=num_bytes
        )

    def _wait_for_pages(self, model: ModelEngine) -> int:
        """Wait for pages for the next weights; return how many pages the weights can have."""
        missing, pool = model.weights.num_missing_pages, self.eviction.pool
        if not self.eviction.wait_for(min(missing, self.pages_per_load)):
            short = f"{model.name} needs {missing} more pages, {pool.num_free} are free"
            raise OutOfPages(short)
        return min(missing, pool.num_free)

    def _learn_bandwidth(self, num_bytes: int, seconds: float) -> None:
        if not num_bytes or seconds <= 0:
            return
        change = num_bytes / seconds - self.bandwidth_bytes_per_s
        size = min(1.0, num_bytes / (2 * self.device.piece_bytes))
        self.bandwidth_bytes_per_s += _BANDWIDTH_SMOOTHING * size * change
