"""All figures of the API layer and the admin API: ``make bench-api`` writes ``bench-api.json``.

Measures the latency added to vLLM's own server, the tokens through a frontend on one core, the
admin API and ``gpupool top`` on a box of simulated devices under load, and many connections at
once. The report is ``build/bench-api.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.added_latency import KINDS, run_added_latency
from benchmarks.admin_latency import run_admin_latency
from benchmarks.bench.rig import make_checkpoints
from benchmarks.connections import NUM_ACTIVE, NUM_IDLE, run_connections
from benchmarks.frontend_rate import run_frontend_rate
from benchmarks.report import at_least, at_most, finish
from benchmarks.stream_client import PATHS

ADDED_LATENCY_S = 0.001
TOKENS_PER_S = 20_000
ADMIN_P99_S = 0.020
TOP_CPU_SHARE = 0.03
FIRST_SCREEN_S = 1.0
IDLE_CPU_SHARE = 0.01
_MODEL_BYTES = 10_000_000


def main() -> int:
    """Run the parts; exit code 1 when a figure was missed."""
    arguments = _parse()
    started_s = time.perf_counter()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "added_latency": lambda folder: run_added_latency(
            make_checkpoints(folder, ["llama"], _MODEL_BYTES)[0], arguments.pairs
        ),
        "frontend_rate": run_frontend_rate,
        "admin": lambda folder: run_admin_latency(folder, arguments.duration),
        "connections": run_connections,
    }
    details = {}
    for name in arguments.part or parts:
        with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
            # Other work of the machine affects the figures, so the report has the load average.
            load = os.getloadavg()[0]
            details[name] = parts[name](Path(folder)) | {"load_average_before": load}
    figures, wall_s = dict(make_figures(details)), time.perf_counter() - started_s
    return finish(arguments.out, figures, details=details, wall_s=wall_s)


def make_figures(details: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures by name, each beside its limit."""
    if latency := details.get("added_latency"):
        for kind in KINDS:
            added_s = latency[kind]["added_p50_s"]
            yield f"added_latency_{kind}_p50_s", at_most(added_s, ADDED_LATENCY_S)
    if rate := details.get("frontend_rate"):
        for path in PATHS:
            name = path.removeprefix("/v1/").replace("/", "_")
            tokens_per_s = rate[path]["paced"]["tokens_per_s"]
            yield f"streamed_tokens_{name}", at_least(tokens_per_s, TOKENS_PER_S)
    if admin := details.get("admin"):
        yield "admin_alone_p99_s", at_most(admin["alone_p99_s"], ADMIN_P99_S)
        yield "admin_p99_s", at_most(admin["p99_s"], ADMIN_P99_S)
        yield "top_cpu_share", at_most(admin["top"]["cpu_share"], TOP_CPU_SHARE)
        yield "top_first_screen_s", at_most(admin["top"]["first_screen_s"], FIRST_SCREEN_S)
    if connections := details.get("connections"):
        yield "idle_connections_kept", at_least(connections["idle_kept"], NUM_IDLE)
        yield "idle_cpu_share", at_most(connections["idle_cpu_share"], IDLE_CPU_SHARE)
        yield "active_completed", at_least(connections["active_completed"], NUM_ACTIVE)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/bench-api.json"))
    parser.add_argument(
        "--part",
        action="append",
        choices=["added_latency", "frontend_rate", "admin", "connections"],
    )
    parser.add_argument("--pairs", type=int, default=300, help="of requests, for added latency")
    parser.add_argument("--duration", type=float, default=60.0, help="of each look, seconds")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
