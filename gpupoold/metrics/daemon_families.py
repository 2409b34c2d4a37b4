"""Metrics of the daemon: caches, recoveries, latency of its event loop."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from gpupoold import __version__
from gpupoold.metrics.families import Family, counter, gauge, histogram
from gpupoold.metrics.scrape import Scrape
from gpupoold.stats.histogram import WORK_BOUNDS_S


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
    migrations, frontends = (
        scrape.control_plane.dispatcher.migrations,
        scrape.control_plane.frontends,
    )
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
