"""Host time between two tokens: ``make bench-step`` writes ``build/bench-step.json``.

``books`` times what the turn loop asks of 40 models with 9,000 KV extents each. ``engines`` steps a
model of one layer in gpupool's turn loop, beside other loaded models, and in vLLM's own loop, and
compares the processor time of the stepping thread outside of the executor. vLLM sends outputs from
another thread of the process, so that its figure has that thread's time too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import kv_books
from benchmarks.bench.rig import make_checkpoints
from benchmarks.report import at_most, finish
from gpupoold.worker.process import set_engine_environment

ADDED_S = 50e-6
BOOKS_S = 50e-6
STREAMS = (1, 8, 64)
_MODEL_BYTES = 4_000_000
# What every step asks; the other books are asked by switches, evictions and aborts.
_EACH_STEP = ("between_steps_us", "ensure_kv_without_pages_us")


def main() -> int:
    """Run both parts; exit code 1 when a figure was missed."""
    arguments = _parse()
    started_s = time.perf_counter()
    details: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    details["books"] = kv_books.measure(arguments.models, arguments.extents)
    details["engines"] = _engines(arguments.idle, arguments.steps)
    figures, wall_s = dict(make_figures(details)), time.perf_counter() - started_s
    return finish(arguments.out, figures, details=details, wall_s=wall_s)


def make_figures(details: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures by name, each beside its limit."""
    books = details["books"]
    yield "books_each_step_s", at_most(1e-6 * sum(books[name] for name in _EACH_STEP), BOOKS_S)
    for streams, times in details["engines"].items():
        yield f"added_host_time_{streams}_streams_s", at_most(1e-6 * times["added_us"], ADDED_S)


def _engines(num_idle: int, num_steps: int) -> dict[str, Any]:
    set_engine_environment("error")
    from benchmarks.step_engines import measure, one_layer

    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as name:
        folder = Path(name)
        checkpoint = one_layer(make_checkpoints(folder, ["llama"], _MODEL_BYTES)[0], folder)
        return measure(folder, checkpoint, num_idle, STREAMS, num_steps)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=int, default=40, help="models of the books")
    parser.add_argument("--extents", type=int, default=9_000, help="KV extents of each")
    parser.add_argument("--idle", type=int, default=3, help="other models beside the engine")
    parser.add_argument("--steps", type=int, default=500, help="steps of each engine")
    parser.add_argument("--out", type=Path, default=Path("build/bench-step.json"))
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # an ordinary exit would print torch's complaints about its threads
