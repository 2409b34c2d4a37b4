"""Metrics of the box under vLLM's names, for endpoint pickers.

The model server protocol of the Gateway API inference extension asks each server for these gauges.
A model of the pool takes the part of a LoRA adapter: requests choose the model by name, resident
models answer at once, and waiting models need a switch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily

from gpupoold.domain import ModelState
from gpupoold.metrics.families import Family, Numbers, Row
from gpupoold.metrics.scrape import Scrape, memories, waiting_requests


def picker_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    waiting = waiting_requests(scrape)
    num_waiting = sum(waiting.values())
    live = scrape.control_plane.dispatcher.live
    num_live = sum(live.num_of(name) for name in scrape.rows)
    yield _gauge("num_requests_waiting", "Live requests before their first step.", num_waiting)
    yield _gauge(
        "num_requests_running", "Live requests after their first step.", num_live - num_waiting
    )
    yield _gauge(
        "kv_cache_usage_perc",
        "KV on devices, as a share of the memory beside the largest model of each device.",
        _kv_share(scrape),
    )
    ready = [
        row.spec.name
        for row in scrape.rows.values()
        if scrape.control_plane.fleet.availability(row.spec.name).state is ModelState.READY
    ]
    resident = {
        one.model
        for worker in scrape.workers
        for one in memories(worker)
        if one.weights_resident_bytes and one.weights_resident_bytes == one.weights_total_bytes
    }
    running = _names(scrape, resident.intersection(ready))
    queued = _names(scrape, {name for name, num in waiting.items() if num} - resident)
    yield Numbers(
        GaugeMetricFamily,
        "lora_requests_info",
        "Time of the scrape; the labels have the resident and the waiting models.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        [((str(len(ready)), running, queued), time.time())],
        _PREFIX,
    )


_PREFIX = "vllm:"


def _gauge(name: str, text: str, value: float | None) -> Family:
    row: Row = ((), value)
    return Numbers(GaugeMetricFamily, name, text, (), [row], _PREFIX)


def _kv_share(scrape: Scrape) -> float | None:
    """Return the share of KV in the memory for KV, None while no worker reports."""
    kv_bytes = limit_bytes = 0
    for worker in scrape.workers:
        if worker.ready is None or worker.status is None:
            continue
        held = memories(worker)
        kv_bytes += sum(one.kv_resident_bytes for one in held)
        largest_bytes = max((one.weights_resident_bytes for one in held), default=0)
        limit_bytes += worker.ready.device_bytes - largest_bytes
    return min(1.0, kv_bytes / limit_bytes) if limit_bytes > 0 else None


def _names(scrape: Scrape, models: set[str]) -> str:
    """Return the names, aliases, presets and adapters of models, for a label."""
    return ",".join(
        name
        for model in sorted(models)
        if model in scrape.rows
        for name in scrape.rows[model].spec.names
    )
