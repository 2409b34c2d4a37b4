"""Latency of the admin API on a box of simulated devices with many models, under load.

A process of its own polls the paths of ``gpupool top`` once a second over kept connections, then in
a burst. Another process generates the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.sim_devices import CappedLengths, add_models, send_all, sim_config
from benchmarks.top_cost import run_top
from gpupoold.domain import Targets
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from gpupoold.stats.histogram import percentile

BOX, NUM_MODELS, REQUESTS_PER_S = "16xH800", 100, 50.0
TARGETS = Targets(10.0, 0.1)
# The path that `gpupool top` requests first, the path of each second, and further paths.
_NEWS = "/top?turns=2000&events=100&requests=500&turns_after={turn}&events_after={event}"
POLLED = (
    "/top?turns=2000&events=100&requests=500",
    _NEWS,
    "/ps",
    "/status",
    "/models",
    "/switches?limit=50",
    "/events?limit=50",
    "/cache",
)
_LEAD_S = 3.0
# Time for the lead, the burst, and the start of `gpupool top`.
_MORE_S = 60.0
_BURST = 100


def run_admin_latency(folder: Path, duration_s: float) -> dict[str, Any]:
    """Latencies by path, and the daemon's CPU share with and without the polling."""
    box = parse_box(BOX)
    names = list(box_models(box, NUM_MODELS, TARGETS))
    rates = equal_rates(names, REQUESTS_PER_S / NUM_MODELS)
    arrivals = poisson_workload(rates, 3 * duration_s + _MORE_S, CappedLengths(4096, 256), 0)
    with private_daemon(sim_config(box), folder / "pool") as daemon:
        add_models(daemon, names, folder, TARGETS)
        alone = _burst(daemon)
        with _load(daemon, arrivals):
            time.sleep(_LEAD_S)
            idle = _polled(daemon, (), duration_s)
            polled = _polled(daemon, POLLED, duration_s)
            burst = _burst(daemon)
            top = run_top(daemon.socket_path, f"{NUM_MODELS} models", duration_s)
    everything = [s for times in (*polled["times_s"].values(), *burst.values()) for s in times]
    return {
        "devices": BOX,
        "models": NUM_MODELS,
        "requests_per_s": REQUESTS_PER_S,
        "calls": len(everything),
        "p50_s": percentile(everything, 0.5),
        "p99_s": percentile(everything, 0.99),
        "max_s": max(everything),
        "alone_p99_s": percentile([s for times in alone.values() for s in times], 0.99),
        "polled": _by_path(polled["times_s"]),
        "burst": _by_path(burst),
        "alone": _by_path(alone),
        "top": top,
        "daemon_cpu_share": {"not_polled": idle["cpu_share"], "polled": polled["cpu_share"]},
    }


def _by_path(times_s: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    return {
        path: {"p50_s": percentile(times, 0.5), "p99_s": percentile(times, 0.99)}
        for path, times in times_s.items()
    }


@dataclass(slots=True)
class _Asker:
    """One client: it knows the last turn and event that it was told of."""

    connection: http.client.HTTPConnection
    turn: int = 0
    event: int = 0

    def ask(self, path: str) -> float:
        """Seconds until the whole answer is there."""
        started_s = time.perf_counter()
        self.connection.request("GET", path.format(turn=self.turn, event=self.event))
        response = self.connection.getresponse()
        body = response.read()
        asked_s = time.perf_counter() - started_s
        assert response.status == 200, path
        if path == _NEWS:
            told = json.loads(body)
            self.turn, self.event = told["last_turn_id"], told["last_event_id"]
        return asked_s


def _polled(daemon: PrivateDaemon, paths: tuple[str, ...], duration_s: float) -> dict[str, Any]:
    """Ask for all paths once a second."""
    process, times_s = psutil.Process(daemon.process.pid), defaultdict(list)
    before, started_s = process.cpu_times(), time.monotonic()
    with _connection(daemon.socket_path) as connection:
        asker = _Asker(connection)
        for second in range(round(duration_s)):
            for path in paths:
                times_s[path].append(asker.ask(path))
            time.sleep(max(0.0, started_s + second + 1 - time.monotonic()))
    after, wall_s = process.cpu_times(), time.monotonic() - started_s
    cpu_s = after.user + after.system - before.user - before.system
    return {"times_s": dict(times_s), "cpu_share": cpu_s / wall_s}


def _burst(daemon: PrivateDaemon) -> dict[str, list[float]]:
    """Each path, again and again without a pause."""
    with _connection(daemon.socket_path) as connection:
        asker = _Asker(connection)
        return {path: [asker.ask(path) for _ in range(_BURST)] for path in POLLED}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("gpupoold", timeout=60)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(path: Path) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(_UnixConnection(path))


@contextlib.contextmanager
def _load(daemon: PrivateDaemon, arrivals: Sequence[SimRequest]) -> Iterator[None]:
    """Requests from a process of their own; what is still to come at the end is left out."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_send, args=(daemon.http_url, arrivals), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive() or process.exitcode == 0
    finally:
        process.kill()
        process.join()


def _send(url: str, arrivals: Sequence[SimRequest]) -> None:
    asyncio.run(send_all(url, arrivals, 0, 0.2))
