"""Metrics of the box under vLLM's names, for endpoint pickers.

The model server protocol of the Gateway API inference extension asks each server for these gauges.
A model of the pool takes the part of a LoRA adapter: requests choose the model by name, resident
models answer at once, and waiting models need a switch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from gpupoold.domain import ModelState
from gpupoold.metrics.families import Family, Numbers, gauge
from gpupoold.metrics.scrape import Scrape, memories


def picker_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
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
        one.model
        for worker in scrape.workers
        for one in memories(worker)
        if one.weights_resident_bytes and one.weights_resident_bytes == one.weights_total_bytes
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
