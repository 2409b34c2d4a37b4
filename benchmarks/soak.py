"""``make soak``: a mixed load for minutes, and the growth of memory, descriptors, threads and logs.

Sends fifteen requests a second; a quarter is cancelled, a tenth has a new schema. Every few seconds
the resident bytes, descriptors and threads of each process and the bytes of logs and database are
read. Writes ``build/soak.json`` with the slopes of the second half, computed from the smallest
reading of each minute, because connections come and go. Exit code 1 if a slope exceeds the limit.

The memory of compiled grammars in a worker is bounded and does not count: with a schema in every
request (``--schemas 1``) a worker's memory rises by some 40 MiB, then falls when a full compiler is
replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of, processes
from benchmarks.report import Figure, at_most, finish

Readings = list[tuple[float, float]]
"""Pairs of seconds since the start, and the value read."""

MODELS = ("llama", "qwen3")
_READ_EVERY_S = 5.0
# Largest growth per minute, in the second half of the run.
_LIMITS = {"rss_bytes": 3 << 20, "fds": 0.5, "threads": 0.5, "log_bytes": 1 << 20}
# Allowed growth in all of a process of a module, for caches.
_CACHE_BYTES = {"gpupoold.worker": 64 << 20}


def main() -> int:
    """Run it; see the module."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="gpupool-soak-") as name:
        folder = Path(name)
        checkpoints = make_checkpoints(folder, list(MODELS), 10_000_000)
        room = emulated_config(int(1.6 * weight_bytes(checkpoints[0])) + (64 << 20))
        with private_daemon(room, folder / "daemon") as daemon:
            for model, checkpoint in zip(MODELS, checkpoints, strict=True):
                daemon.add_model(model, checkpoint, max_model_len=1024, dtype="float32")
            statuses, readings = asyncio.run(_soak(daemon, folder / "daemon", arguments))
    figures = dict(make_figures(statuses, readings))
    return finish(arguments.out, figures, statuses=statuses, readings=readings)


def make_figures(
    statuses: Mapping[int, int], readings: Mapping[str, Readings]
) -> Iterator[tuple[str, Figure]]:
    """The figures by name: the growth per minute in the second half, and failed requests."""
    for name, found in sorted(readings.items()):
        kind = name.rpartition(" ")[2]
        if kind in _LIMITS:
            reached = not _is_growth(found, name)
            yield f"growth of {name}", at_most(_slope(found), _LIMITS[kind]) | {"reached": reached}
    failed = sum(count for status, count in statuses.items() if status not in (200, 499, 503))
    yield "failed_requests", at_most(failed, 0)


async def _soak(
    daemon: PrivateDaemon, folder: Path, arguments: argparse.Namespace
) -> tuple[Counter[int], dict[str, Readings]]:
    rng, statuses = random.Random(0), Counter[int]()
    readings: dict[str, Readings] = {}
    started_s = last_s = time.monotonic()
    limits = httpx.Limits(max_connections=200)
    async with (
        httpx.AsyncClient(base_url=daemon.http_url, timeout=120, limits=limits) as http,
        asyncio.TaskGroup() as group,
    ):
        while (now_s := time.monotonic()) < started_s + arguments.minutes * 60:
            group.create_task(_ask(http, rng.randrange(10**9), statuses, arguments.schemas))
            if now_s - last_s >= _READ_EVERY_S:
                last_s = now_s
                for name, value in _read(daemon, folder).items():
                    readings.setdefault(name, []).append((now_s - started_s, value))
            await asyncio.sleep(rng.expovariate(arguments.rps))
    return statuses, readings


async def _ask(
    http: httpx.AsyncClient, number: int, statuses: Counter[int], schemas: float
) -> None:
    rng = random.Random(number)
    body: dict[str, Any] = {"model": rng.choice(MODELS), "stream": True, "temperature": 0}
    body |= {"prompt": f"request {number} " * rng.randrange(1, 20)}
    body |= {"max_tokens": rng.randrange(1, 30)}
    if rng.random() < schemas:
        names = {f"field{rng.randrange(10**6)}": {"type": "integer"} for _ in range(3)}
        schema = {"type": "object", "properties": names, "required": list(names)}
        body["structured_outputs"] = {"json": schema}
    is_cancelled = rng.random() < 0.25
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            if is_cancelled:
                statuses[499] += 1
                return
        statuses[answer.status_code] += 1


def _read(daemon: PrivateDaemon, folder: Path) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for one in processes(daemon):
        name = module_of(one)
        found[f"{name} {one.pid} rss_bytes"] = one.memory_info().rss
        found[f"{name} {one.pid} fds"] = one.num_fds()
        found[f"{name} {one.pid} threads"] = one.num_threads()
    state = folder / "state"
    found["log_bytes"] = sum(file.stat().st_size for file in state.rglob("*.log*"))
    found["database_bytes"] = sum(file.stat().st_size for file in state.glob("*.db*"))
    return found


def _is_growth(readings: Readings, name: str) -> bool:
    kind = name.rpartition(" ")[2]
    cache_bytes = _CACHE_BYTES.get(name.partition(" ")[0])
    if kind == "rss_bytes" and cache_bytes and readings[-1][1] - readings[0][1] <= cache_bytes:
        return False
    return _slope(readings) > _LIMITS.get(kind, math.inf)


def _slope(readings: Readings) -> float:
    """What is added in a minute, in the second half."""
    half = _floors(readings[len(readings) // 2 :])
    if len(half) < 2:
        return 0.0
    return linear_regression(*zip(*half, strict=True)).slope * 60


def _floors(readings: Readings) -> Readings:
    """The least reading of each minute, with its time."""
    minutes = itertools.groupby(readings, lambda one: one[0] // 60)
    return [min(ones, key=lambda one: one[1]) for _, ones in minutes]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rps", type=float, default=15.0)
    parser.add_argument("--schemas", type=float, default=0.1, help="share of requests")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
