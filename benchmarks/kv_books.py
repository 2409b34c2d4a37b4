"""Cost of the turn loop's queries about KV extents: ``python -m benchmarks.kv_books``.

Forty models have 9,000 extents each, as many as 80 GB of KV in extents of 8 MiB; here an extent is
a page of 4 KiB. Each model has a hundredth of its extents on the device, all in use; one model
runs. Prints the median of each operation in microseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

from gpupoold.memory.device import AddressRange
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import KvGeometry, KvRow, Place
from gpupoold.memory.pages import PagePool
from gpupoold.memory.weights import WeightMemory
from gpupoold.worker.kv.page_eviction import Use
from gpupoold.worker.kv.residency import Residency
from tests.unit.memory.ledger import MemoryLedger

# The timed operations copy nothing, so the size of a page does not matter.
_PAGE_BYTES = 4096
_BLOCKS_PER_EXTENT = 8
_SHARE_ON_DEVICE = 100  # 1 of 100 extents is on the device
_ROUNDS = 20


@dataclass
class BookModel:
    """A model with a ledger of its own; only its memory is real."""

    prefixes = None

    name: str
    weights: WeightMemory
    kv: KvMemory
    ledger: MemoryLedger
    num_missing: int = 0

    def is_ready(self) -> bool:
        """Always: what is away is another request's."""
        return True

    def wanted_blocks(self) -> list[int]:
        """None that is away."""
        return []

    def preempt(self) -> None:
        """Not reached."""

    def num_missing_blocks(self) -> tuple[int, int]:
        """As many as the measurement says."""
        return self.num_missing, 0


def make(num_models: int, num_extents: int) -> tuple[Residency, list[BookModel]]:
    """A residency with so many models, each with every hundredth extent in use."""
    device = EmulatedDevice(num_models * (num_extents // _SHARE_ON_DEVICE + 8) * _PAGE_BYTES, 4096)
    pool, host = PagePool(device.num_pages), KvHostCache(1 << 20)
    use = Use(1, 0.0, 10.0, math.inf)
    residency = Residency(device, pool, host, 1e9, lambda _: use)
    models = []
    for number in range(num_models):
        stride = _PAGE_BYTES // _BLOCKS_PER_EXTENT
        row = KvRow(0, stride, stride)
        geometry = KvGeometry(num_extents * _BLOCKS_PER_EXTENT, _PAGE_BYTES, (row,))
        kv = KvMemory(geometry, AddressRange(device, pool, geometry.num_pages), device, host)
        ledger = MemoryLedger(geometry.num_blocks)
        kv.attach(ledger)
        snapshot = HostBuffer.create("books", _PAGE_BYTES)
        weights = WeightMemory(AddressRange(device, pool, 1), device, snapshot)
        kv.map(list(range(num_extents // _SHARE_ON_DEVICE)))
        ledger.allocate(ledger.num_free)
        models.append(BookModel(f"m{number}", weights, kv, ledger))
        residency.add(cast(Any, models[-1]))
    return residency, models


def microseconds(act: Callable[[], Any]) -> float:
    """The median time of some calls."""
    times_s = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - started_s)
    return 1e6 * median(times_s)


def _between_steps(residency: Residency, name: str) -> None:
    residency.advance(name)
    residency.eviction.settle_exports()


def measure(num_models: int, num_extents: int) -> dict[str, float]:
    """Microseconds of what is asked between two tokens."""
    residency, models = make(num_models, num_extents)
    first = models[0]
    residency.switch_in(first.name)
    eviction = residency.eviction
    times = {
        "resident_switch_us": microseconds(lambda: residency.switch_in(first.name)),
        "between_steps_us": microseconds(lambda: _between_steps(residency, first.name)),
        "ensure_kv_us": microseconds(lambda: residency.ensure_kv(first.name)),
        "holdings_of_all_models_us": microseconds(
            lambda: [eviction._holding(one.name, False) for one in models]
        ),
        "extents_without_pages_us": microseconds(lambda: first.kv.index.extents(Place.UNMAPPED)),
        "idle_extents_us": microseconds(first.kv.index.idle),
        "aborted_request_us": microseconds(first.kv.discard_dead),
    }
    first.num_missing = 10 * _BLOCKS_PER_EXTENT * num_extents  # more than all pages
    times["eviction_us"] = microseconds(lambda: eviction.free_pages(1 << 30, {first.name}))
    residency.ensure_kv(first.name)
    times["ensure_kv_without_pages_us"] = microseconds(lambda: residency.ensure_kv(first.name))
    return times


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--extents", type=int, default=9_000)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.models, arguments.extents), indent=1))


if __name__ == "__main__":
    main()
