"""Metrics of the daemon, and metrics with the label ``device``, one set per device."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from gpupoold import __version__
from gpupoold.control.accounting.meters import MOVED_KINDS, WEIGHTS_SOURCES
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import SWITCH_STAGES, Role
from gpupoold.metrics.families import Family, Scrape, counter, gauge, histogram, memories, one_each
from gpupoold.stats.histogram import WORK_BOUNDS_S
from gpupoold.system.nvml import Reading
from gpupoold.wire.messages import WorkerReady, WorkerStatus

_GPU_READINGS: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("gpu_utilisation_ratio", "Share of time in which kernels ran", lambda gpu: gpu.utilisation),
    ("gpu_temperature_celsius", "The temperature", lambda reading: reading.temperature_c),
    ("gpu_power_watts", "The power", lambda reading: reading.power_w),
    ("gpu_memory_used_bytes", "Memory that all processes use", lambda reading: reading.used_bytes),
)


def device_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _device(scrape)
    yield from _gpu(scrape)
    yield from _group_gpus(scrape)
    yield from _memory(scrape)
    yield from _engines(scrape)
    yield from _turns(scrape)
    yield from _switches(scrape)


def _device(scrape: Scrape) -> Iterator[Family]:
    dispatcher = scrape.control_plane.dispatcher
    gauge_of = one_each(gauge, "device", scrape.devices())
    counter_of = one_each(counter, "device", scrape.devices())
    yield gauge(
        "device_info",
        "1; the labels describe the device.",
        ("device", "kind", "name"),
        (
            ((number, worker.device.kind, worker.ready.device_name if worker.ready else ""), 1)
            for number, worker in scrape.devices()
        ),
    )
    yield gauge_of(
        "device_up",
        "1 while the device's worker can load and serve.",
        lambda worker: worker.is_ready,
    )
    yield gauge_of(
        "device_parked",
        "1 while the device has given its memory back until the next request.",
        lambda worker: worker.state == "parked",
    )
    yield gauge(
        "device_role",
        "1 for the device's role, 0 for other roles.",
        ("device", "role"),
        (
            ((number, role.value), dispatcher.roles.of(worker.number)[0] is role)
            for number, worker in scrape.devices()
            for role in Role
        ),
    )
    yield gauge_of(
        "device_draining",
        "1 while the device is emptied for maintenance.",
        lambda worker: scrape.control_plane.fleet.is_device_draining(worker.number),
    )
    numbers = [worker.number for worker in scrape.workers]
    nums = dict(zip(numbers, dispatcher.nums_of_requests(numbers), strict=True))
    yield gauge_of(
        "device_requests",
        "Live requests on the device or assigned to the device.",
        lambda worker: nums[worker.number],
    )
    yield gauge_of(
        "device_waiting_for_kv_requests",
        "Requests not sent to the device for lack of KV memory.",
        lambda worker: dispatcher.state.num_waiting_for_kv(worker.number),
    )
    yield counter_of(
        "worker_restarts",
        "Times the device's worker has ended and was started again.",
        lambda worker: worker.num_restarts,
    )
    yield counter_of(
        "device_steps",
        "Steps of engines; from 0 again when the worker is started again.",
        _reported(lambda now: now.activity.num_steps),
    )
    yield counter_of(
        "device_kv_recomputed",
        "Times a model's KV was dropped for want of host memory and had to be computed anew; "
        "from 0 again when the worker is started again.",
        _reported(lambda now: now.activity.num_recomputed),
    )


def _gpu(scrape: Scrape) -> Iterator[Family]:
    gauge_of = one_each(gauge, "device", scrape.devices())
    counter_of = one_each(counter, "device", scrape.devices())
    yield gauge_of(
        "device_utilisation_ratio",
        "Share of time in which kernels ran; absent without a reading.",
        lambda worker: worker.reading.utilisation,
    )
    yield gauge_of(
        "device_temperature_celsius",
        "The GPU's temperature; absent without a reading.",
        lambda worker: worker.reading.temperature_c,
    )
    yield gauge_of(
        "device_power_watts",
        "The GPU's power; absent without a reading.",
        lambda worker: worker.reading.power_w,
    )
    yield counter_of(
        "device_energy_joules",
        "The GPU's energy since the driver was loaded; absent without a reading.",
        lambda worker: worker.reading.energy_j,
    )


def _group_gpus(scrape: Scrape) -> Iterator[Family]:
    groups = [(number, worker) for number, worker in scrape.devices() if worker.device.num_gpus > 1]
    yield gauge(
        "device_gpus",
        "Number of GPUs of the device: more than 1 for a group.",
        ("device",),
        (((number,), worker.device.num_gpus) for number, worker in scrape.devices()),
    )
    for name, text, value in _GPU_READINGS:
        yield gauge(
            name,
            f"{text}, of each GPU of a group; absent without a reading.",
            ("device", "gpu"),
            (
                ((number, str(gpu.ordinal)), reading)
                for number, worker in groups
                for gpu in worker.reading.gpus
                if (reading := value(gpu)) is not None
            ),
        )


def _memory(scrape: Scrape) -> Iterator[Family]:
    gauge_of = one_each(gauge, "device", scrape.devices())
    yield gauge_of(
        "device_memory_limit_bytes",
        "The device's memory for weights and KV.",
        _known(lambda ready: ready.facts.device_bytes),
    )
    yield gauge(
        "device_memory_bytes",
        "The device's memory for weights and KV, by use.",
        ("device", "kind"),
        (
            ((number, kind), num_bytes)
            for number, worker in scrape.devices()
            for kind, num_bytes in _memory_split(worker)
        ),
    )
    yield gauge_of(
        "device_page_bytes",
        "Bytes of a page of the device's memory.",
        _known(lambda ready: ready.facts.page_bytes),
    )
    yield gauge_of(
        "device_kv_host_bytes",
        "Host memory used by the device's worker for offloaded KV.",
        _reported(lambda now: now.activity.kv_host_bytes),
    )
    yield gauge_of(
        "device_prefix_bytes",
        "Host memory of the same cache with KV of ended requests, which gives way to offloaded KV.",
        _reported(lambda now: now.activity.prefix_bytes),
    )
    yield gauge_of(
        "device_kv_host_slab_bytes",
        "Host memory of the same cache in slabs for blocks of some size, used or not: what exceeds "
        "the two sizes in use is fragmentation.",
        _reported(lambda now: now.kv_host_slab_bytes),
    )
    yield gauge_of(
        "device_kv_host_limit_bytes",
        "Limit of host memory for offloaded KV; absent without a limit.",
        _known(lambda ready: ready.facts.kv_host_limit_bytes),
    )


def _engines(scrape: Scrape) -> Iterator[Family]:
    gauge_of = one_each(gauge, "device", scrape.devices())
    hosts, room = scrape.control_plane.fleet.hosts, scrape.control_plane.lifecycle.room
    engines = [
        (number, model, host)
        for number, worker in scrape.devices()
        for model, host in hosts.engines_on(worker.number).items()
    ]
    yield gauge(
        "device_engine_bytes",
        "Memory of engines outside the device's pages, measured at their loads, by model.",
        ("device", "model"),
        (((number, model), host.memory.device_bytes) for number, model, host in engines),
    )
    yield gauge(
        "device_engine_load_seconds",
        "Time of the load of each present engine, by stage.",
        ("device", "model", "stage"),
        (
            ((number, model, stage), seconds)
            for number, model, host in engines
            for stage, seconds in host.load.by_name().items()
        ),
    )
    yield gauge(
        "device_engine_graph_sizes",
        "Sizes of batches with CUDA graphs: of the load (first), captured later (late), and left.",
        ("device", "model", "captured"),
        (
            ((number, model, captured), getattr(host.graphs, f"num_{captured}"))
            for number, model, host in engines
            for captured in ("first", "late", "left")
        ),
    )
    yield gauge(
        "device_engine_late_capture_seconds",
        "Time of the captures after the load of each present engine.",
        ("device", "model"),
        (((number, model), host.graphs.late_s) for number, model, host in engines),
    )
    yield gauge_of(
        "device_engine_limit_bytes",
        "Limit of the memory of engines outside the device's pages; absent without a limit.",
        room.limit_bytes,
    )


def _turns(scrape: Scrape) -> Iterator[Family]:
    yield counter(
        "device_turns",
        "Ended turns, by model.",
        ("device", "model"),
        (
            ((number, model), count)
            for number, meter in scrape.meters()
            for model, count in meter.turns.items()
        ),
    )
    yield counter(
        "device_turn_seconds",
        "Duration of ended turns, from the end of the switch, by model.",
        ("device", "model"),
        (
            ((number, model), seconds)
            for number, meter in scrape.meters()
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
            for number, meter in scrape.meters()
            for kind in WEIGHTS_SOURCES
        ),
    )
    yield counter(
        "switch_stage_seconds",
        "Duration of switches, by stage.",
        ("device", "stage"),
        (
            ((number, stage), meter.stage_seconds[stage])
            for number, meter in scrape.meters()
            for stage in SWITCH_STAGES
        ),
    )
    yield counter(
        "switch_bytes",
        "Bytes moved by switches, and bytes of prefetched weights.",
        ("device", "kind"),
        (
            ((number, kind), meter.moved_bytes[kind])
            for number, meter in scrape.meters()
            for kind in MOVED_KINDS
        ),
    )
    switch_seconds = scrape.control_plane.dispatcher.accounts.meters.switch_seconds
    yield histogram(
        "switch_seconds",
        "How long a switch took, all stages together, by kind.",
        ("kind",),
        (((kind,), times) for kind, times in switch_seconds.items()),
    )


def _memory_split(worker: Worker) -> list[tuple[str, int]]:
    """Return bytes by use, an empty list while the worker is down."""
    if worker.status is None:
        return []
    held = memories(worker)
    return [
        ("free", worker.status.activity.free_bytes),
        ("weights", sum(model.weights_resident_bytes for model in held)),
        ("kv", sum(model.kv_resident_bytes for model in held)),
    ]


def _reported(value: Callable[[WorkerStatus], float]) -> Callable[[Worker], float | None]:
    return lambda worker: None if worker.status is None else value(worker.status)


def _known(value: Callable[[WorkerReady], float | None]) -> Callable[[Worker], float | None]:
    return lambda worker: None if worker.ready is None else value(worker.ready)


def daemon_families(scrape: Scrape) -> Iterator[Family]:
    """Yield the families of one scrape."""
    yield from _state(scrape)
    yield from _caches(scrape)
    yield from _recoveries(scrape)
    yield from _speed(scrape)


def _state(scrape: Scrape) -> Iterator[Family]:
    control_plane = scrape.control_plane
    readies = [worker.ready for worker in scrape.workers if worker.ready is not None]
    engine = readies[0].engine_version if readies else ""
    yield gauge(
        "build_info",
        "1; the labels have the versions.",
        ("version", "engine_version", "python_version"),
        [((__version__, engine, platform.python_version()), 1)],
    )
    yield gauge(
        "ready", "1 while requests can be served.", (), [((), control_plane.state == "ready")]
    )
    yield gauge("models", "Registered models.", (), [((), len(scrape.rows))])
    yield counter(
        "history_dropped_rows",
        "Rows of the history that were lost because the disk did not accept the rows.",
        (),
        [((), control_plane.history.dropped_rows)],
    )


def _caches(scrape: Scrape) -> Iterator[Family]:
    control_plane = scrape.control_plane
    yield gauge(
        "model_cache_bytes",
        "Host memory used by weights snapshots, including loads and evictions in progress.",
        (),
        [((), control_plane.cache.used_bytes)],
    )
    yield gauge(
        "model_cache_limit_bytes",
        "Limit of host memory for weights snapshots.",
        (),
        [((), control_plane.cache.budget_bytes)],
    )
    yield counter(
        "model_cache_evictions",
        "Weights snapshots that were evicted from host memory, or dropped by hand.",
        (),
        [((), control_plane.cache.num_evicted)],
    )
    yield gauge(
        "model_cache_disk_bytes",
        "Disk space used by snapshot files.",
        (),
        [((), scrape.saved_bytes)],
    )
    yield gauge(
        "model_cache_disk_limit_bytes",
        "Limit of disk space for snapshot files.",
        (),
        [((), control_plane.saved.budget_bytes)],
    )


def _recoveries(scrape: Scrape) -> Iterator[Family]:
    migrations = scrape.control_plane.dispatcher.migrations
    frontends = scrape.control_plane.frontends
    yield gauge(
        "frontend_up",
        "1 while the frontend of this number accepts connections.",
        ("frontend",),
        [((str(frontend.number),), frontend.is_ready) for frontend in frontends],
    )
    yield counter(
        "frontend_restarts",
        "Times the frontend of this number has ended and was started again.",
        ("frontend",),
        [((str(frontend.number),), frontend.num_restarts) for frontend in frontends],
    )
    yield counter(
        "requests_migrated",
        "Requests that left a device: migrated, or unknown to the device.",
        ("result",),
        [(("migrated",), migrations.num_migrated), (("unknown",), migrations.num_unknown)],
    )


def _speed(scrape: Scrape) -> Iterator[Family]:
    control_plane = scrape.control_plane
    yield histogram(
        "scheduler_decision_seconds",
        "Duration of a call of the scheduling core.",
        (),
        [((), control_plane.dispatcher.shell.decisions)],
        WORK_BOUNDS_S,
    )
    yield histogram(
        "event_loop_lag_seconds",
        "By how much an event loop came too late, ten times a second.",
        ("process",),
        [
            (("daemon",), control_plane.loop_lag),
            *(((frontend.name,), frontend.loop_lag) for frontend in control_plane.frontends),
        ],
        WORK_BOUNDS_S,
    )
