"""Loads of weights in switches, and the bandwidth that the loads measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpupoold.memory.contracts import Device, OutOfPages
from gpupoold.memory.transfers import BATCH_BYTES, TransferQueue
from gpupoold.wire.messages import SwitchRecord
from gpupoold.worker.kv.page_eviction import PageEviction

if TYPE_CHECKING:
    from gpupoold.worker.engine.engine import ModelEngine

# Weight of a load in the mean: less for a load too small to overlap mapping and copying.
_BANDWIDTH_SMOOTHING = 0.2
# Bytes mapped at a time for copies beside steps or further mappings. The running model waits for
# the mapping: on a GPU 1.3 ms for 5 ms of copying.
_PIECE_BYTES = 256 << 20


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
        if not has_waited:  # else copies have overlapped the waiting
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
