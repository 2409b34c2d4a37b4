"""Metrics with the label ``device``, one set per device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from gpupoold.control.accounting.meters import MOVED_KINDS, STAGES, SWITCH_KINDS
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Role
from gpupoold.metrics.families import Family, counter, gauge, histogram
from gpupoold.metrics.scrape import Scrape, memories
from gpupoold.wire.messages import WorkerReady, WorkerStatus

_DEVICE = ("device",)
T = TypeVar("T")


def device_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _device(scrape)
    yield from _gpu(scrape)
    yield from _memory(scrape)
    yield from _turns(scrape)
    yield from _switches(scrape)


def _device(scrape: Scrape) -> Iterator[Family]:
    dispatcher = scrape.pool.dispatcher
    yield gauge(
        "device_info",
        "1; the labels say what the device is.",
        ("device", "kind", "name"),
        (
            ((number, one.device.kind, one.ready.device_name if one.ready else ""), 1)
            for number, one, _ in scrape.devices()
        ),
    )
    yield gauge(
        "device_up",
        "1 while the device's worker can load and serve.",
        _DEVICE,
        (((number,), one.is_ready) for number, one, _ in scrape.devices()),
    )
    yield gauge(
        "device_role",
        "1 for the role that the device has, 0 for the others.",
        ("device", "role"),
        (
            ((number, role.value), dispatcher.roles.of(one.number)[0] is role)
            for number, one, _ in scrape.devices()
            for role in Role
        ),
    )
    yield gauge(
        "device_draining",
        "1 while the device is emptied for maintenance.",
        _DEVICE,
        (
            ((number,), dispatcher.roles.is_draining(one.number))
            for number, one, _ in scrape.devices()
        ),
    )
    numbers = [one.number for one in scrape.workers]
    nums = dispatcher.nums_of_requests(numbers)
    yield gauge(
        "device_requests",
        "Live requests that the device has or is to get.",
        _DEVICE,
        (((str(number),), num) for number, num in zip(numbers, nums, strict=True)),
    )
    yield gauge(
        "device_waiting_for_kv_requests",
        "Requests that are not sent to the device, as there is no room for their KV.",
        _DEVICE,
        (
            ((number,), dispatcher.scheduler.num_waiting_for_kv(one.number))
            for number, one, _ in scrape.devices()
        ),
    )
    yield counter(
        "worker_restarts",
        "Times the device's worker has ended and was started again.",
        _DEVICE,
        (((number,), one.num_restarts) for number, one, _ in scrape.devices()),
    )
    yield counter(
        "device_steps",
        "Steps of engines; from 0 again when the worker is started again.",
        _DEVICE,
        (((number,), _told(one, lambda now: now.num_steps)) for number, one, _ in scrape.devices()),
    )
    yield counter(
        "device_kv_recomputed",
        "Times a model's KV was dropped for want of host memory and had to be computed anew; "
        "from 0 again when the worker is started again.",
        _DEVICE,
        (
            ((number,), _told(one, lambda now: now.num_recomputed))
            for number, one, _ in scrape.devices()
        ),
    )


def _gpu(scrape: Scrape) -> Iterator[Family]:
    yield gauge(
        "device_utilisation_ratio",
        "Share of time in which kernels ran, from NVML; absent where it does not tell.",
        _DEVICE,
        (((number,), one.reading.utilisation) for number, one, _ in scrape.devices()),
    )
    yield gauge(
        "device_temperature_celsius",
        "The GPU's temperature, from NVML; absent where it does not tell.",
        _DEVICE,
        (((number,), one.reading.temperature_c) for number, one, _ in scrape.devices()),
    )
    yield gauge(
        "device_power_watts",
        "The GPU's power, from NVML; absent where it does not tell.",
        _DEVICE,
        (((number,), one.reading.power_w) for number, one, _ in scrape.devices()),
    )


def _memory(scrape: Scrape) -> Iterator[Family]:
    yield gauge(
        "device_memory_limit_bytes",
        "Memory that the device gives to weights and KV.",
        _DEVICE,
        (
            ((number,), _known(one, lambda ready: ready.device_bytes))
            for number, one, _ in scrape.devices()
        ),
    )
    yield gauge(
        "device_memory_bytes",
        "That memory by what it is used for.",
        ("device", "kind"),
        (
            ((number, kind), num_bytes)
            for number, one, _ in scrape.devices()
            for kind, num_bytes in _memory_split(one)
        ),
    )
    yield gauge(
        "device_page_bytes",
        "Bytes of one page of that memory.",
        _DEVICE,
        (
            ((number,), _known(one, lambda ready: ready.page_bytes))
            for number, one, _ in scrape.devices()
        ),
    )
    yield gauge(
        "device_kv_host_bytes",
        "Host memory that the device's worker uses for KV of paused requests.",
        _DEVICE,
        (
            ((number,), _told(one, lambda now: now.kv_host_bytes))
            for number, one, _ in scrape.devices()
        ),
    )
    yield gauge(
        "device_kv_host_limit_bytes",
        "Host memory that it may use for that; absent without a limit.",
        _DEVICE,
        (
            ((number,), _known(one, lambda ready: ready.kv_host_bytes))
            for number, one, _ in scrape.devices()
        ),
    )


def _turns(scrape: Scrape) -> Iterator[Family]:
    yield counter(
        "device_turns",
        "Turns that have ended, by model.",
        ("device", "model"),
        (
            ((number, model), count)
            for number, _, meter in scrape.devices()
            for model, count in meter.turns.items()
        ),
    )
    yield counter(
        "device_turn_seconds",
        "How long those turns lasted from when the model could run, by model.",
        ("device", "model"),
        (
            ((number, model), seconds)
            for number, _, meter in scrape.devices()
            for model, seconds in meter.turn_seconds.items()
        ),
    )


def _switches(scrape: Scrape) -> Iterator[Family]:
    yield counter(
        "switches",
        "Switches to another model, by where its weights were: resident on the device, "
        "prefetched to it during the turn before, host_cached in host memory (all or some), or "
        "cold: read from the disk just before.",
        ("device", "kind"),
        (
            ((number, kind), meter.switches[kind])
            for number, _, meter in scrape.devices()
            for kind in SWITCH_KINDS
        ),
    )
    yield counter(
        "switch_stage_seconds",
        "Time that switches took, by stage.",
        ("device", "stage"),
        (
            ((number, stage), meter.stage_seconds[stage])
            for number, _, meter in scrape.devices()
            for stage in STAGES
        ),
    )
    yield counter(
        "switch_bytes",
        "Bytes that switches moved, and those of weights that came before them.",
        ("device", "kind"),
        (
            ((number, kind), meter.moved_bytes[kind])
            for number, _, meter in scrape.devices()
            for kind in MOVED_KINDS
        ),
    )
    yield histogram(
        "switch_seconds",
        "How long a switch took, all stages together, by kind.",
        ("kind",),
        (
            ((kind,), one)
            for kind, one in scrape.pool.dispatcher.accounts.meters.switch_seconds.items()
        ),
    )


def _memory_split(worker: Worker) -> list[tuple[str, int]]:
    """Return bytes by use, an empty list while the worker is down."""
    if worker.status is None:
        return []
    held = memories(worker)
    return [
        ("free", worker.status.free_bytes),
        ("weights", sum(one.weights_resident_bytes for one in held)),
        ("kv", sum(one.kv_resident_bytes for one in held)),
    ]


def _told(worker: Worker, value: Callable[[WorkerStatus], T]) -> T | None:
    return None if worker.status is None else value(worker.status)


def _known(worker: Worker, value: Callable[[WorkerReady], T]) -> T | None:
    return None if worker.ready is None else value(worker.ready)
