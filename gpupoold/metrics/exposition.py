"""The text of ``/metrics``, made at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpupool_state import ModelRow
from gpupoold.control.control_plane import ControlPlane
from gpupoold.domain import ModelState
from gpupoold.metrics.device_families import daemon_families, device_families
from gpupoold.metrics.families import Family, Numbers, Scrape, gauge, memories
from gpupoold.metrics.model_families import model_families

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# More frequent scrapes get the same text: a scrape of a large box takes tens of milliseconds.
_HOLDS_S = 0.5


class Exporter:
    """A generator of one daemon's metrics; not thread-safe."""

    def __init__(
        self, control_plane: ControlPlane, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._pool = control_plane
        self._making = asyncio.Lock()
        self._text = b""
        self._rows: dict[str, ModelRow] = {}
        self._made_s: float | None = None

    async def text(self) -> bytes:
        """All metrics now, or half a second ago, in Prometheus' text format."""
        async with self._making:
            if self._made_s is None or self._clock() - self._made_s > _HOLDS_S:
                self._text = await self._make()
                self._made_s = self._clock()
            return self._text

    async def _make(self) -> bytes:
        found: list[Family] = []
        scrape = await Scrape.of(self._pool, self._rows)
        self._rows = scrape.rows
        for families in (model_families, device_families, daemon_families, picker_families):
            for family in families(scrape):
                found.append(family)
                await asyncio.sleep(0)  # tokens go first
        return await asyncio.to_thread(_text_of, found)


class _Found(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return (family.metric() for family in self._families)


def _text_of(families: Iterable[Family]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def picker_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape.

    The model server protocol of the Gateway API inference extension asks each server for these
    gauges. A model of the pool takes the part of a LoRA adapter: requests choose the model by name,
    resident models answer at once, and waiting models need a switch.
    """
    for family in (*_load(scrape), _residency(scrape)):
        yield replace(family, prefix="vllm:")


def _load(scrape: Scrape) -> Iterator[Numbers]:
    live = scrape.control_plane.dispatcher.live
    num_waiting = scrape.waiting.total()
    num_running = sum(live.num_of(name) for name in scrape.rows) - num_waiting
    yield gauge(
        "num_requests_waiting", "Live requests before their first step.", (), [((), num_waiting)]
    )
    yield gauge(
        "num_requests_running", "Live requests after their first step.", (), [((), num_running)]
    )
    yield gauge(
        "kv_cache_usage_perc",
        "KV on devices, as a share of the memory beside the largest model of each device.",
        (),
        [((), _kv_share(scrape))],
    )


def _residency(scrape: Scrape) -> Numbers:
    fleet = scrape.control_plane.fleet
    ready = [name for name in scrape.rows if fleet.availability(name).state is ModelState.READY]
    resident = {
        memory.model
        for worker in scrape.workers
        for memory in memories(worker)
        if memory.weights_resident_bytes
        and memory.weights_resident_bytes == memory.weights_total_bytes
    }
    running = _names(scrape, resident.intersection(ready))
    queued = _names(scrape, {name for name, num in scrape.waiting.items() if num} - resident)
    return gauge(
        "lora_requests_info",
        "Time of the scrape; the labels have the resident and the waiting models.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        [((str(len(ready)), running, queued), time.time())],
    )


def _kv_share(scrape: Scrape) -> float | None:
    """Return the share of KV in the memory for KV, None while no worker reports."""
    kv_bytes = limit_bytes = 0
    for worker in scrape.workers:
        if worker.ready is None or worker.status is None:
            continue
        held = memories(worker)
        kv_bytes += sum(model.kv_resident_bytes for model in held)
        largest_bytes = max((model.weights_resident_bytes for model in held), default=0)
        limit_bytes += worker.ready.facts.device_bytes - largest_bytes
    return min(1.0, kv_bytes / limit_bytes) if limit_bytes > 0 else None


def _names(scrape: Scrape, models: set[str]) -> str:
    return ",".join(
        name
        for model in sorted(models)
        if model in scrape.rows
        for name in scrape.rows[model].spec.names
    )
