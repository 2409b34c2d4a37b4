"""All figures of device and host memory: ``make bench-memory`` writes ``build/bench-memory.json``.

Measured on the first GPU, or on an emulated device if there is no GPU. Each figure has a limit; the
values from which limits are derived are measured in the same run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.memory import run_memory_bench
from benchmarks.bench.switch import run_switch_bench
from benchmarks.memory_streams import run_streams
from benchmarks.report import Figure, at_least, at_most, finish
from gpupoold.units import parse_size_bytes

KV_MODEL_BYTES = 30_000_000
ROOT = Path(__file__).resolve().parent.parent
# Least share of a transfer's time hidden behind steps. On a CPU the same processors copy and
# compute, and a transfer alone has all processors: behind steps the total may be a tenth longer.
HIDDEN_SHARE = 0.5
HIDDEN_SHARE_ON_CPU = -0.1
# Limits of the run with streams. Half a MiB is the largest value shown as "0 MiB".
COUNT_LIMITS = {"differing_tokens": 0, "pages_leaked": 0, "host_bytes_gained": 1 << 19}
_LAST_LINES = 20
_ROUNDS_OF_KV = 3  # a round takes milliseconds


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    arguments = _parse()
    started_s = time.perf_counter()
    details = {
        "memory": _in_folder(
            lambda folder: run_memory_bench(
                folder, KV_MODEL_BYTES, arguments.kv, _ROUNDS_OF_KV * arguments.rounds
            )
        ),
        "switch": _in_folder(
            lambda folder: run_switch_bench(folder, arguments.size, arguments.rounds)
        ),
        "streams": _in_folder(lambda folder: run_streams(folder, arguments.switches)),
        "operations": run_machine(arguments.operations),
    }
    figures = dict(make_figures(details, arguments.switches))
    wall_s = time.perf_counter() - started_s
    return finish(arguments.out, figures, wall_s=wall_s, details=details)


def make_figures(details: Mapping[str, Any], num_switches: int) -> Iterator[tuple[str, Figure]]:
    """The figures by name, which ends in their unit; ``ratio`` is measured over limit."""
    for mode, kinds in details["switch"]["modes"].items():
        for kind, row in kinds.items():
            of = row["limit_of"]
            name = f"{mode}_switch{'_with_kv' if kind == 'with_kv' else ''}_{of}"
            yield name, at_most(row[of], row["limit_s"])
    swap, overlap = details["memory"]["kv_swap"], details["memory"]["kv_overlap"]
    yield "kv_swap_bytes_per_s", at_least(swap["bytes_per_s"], swap["limit_bytes_per_s"])
    is_on_cpu = "memcpy_one_thread" in swap["memcpy_bytes_per_s"]
    hidden = HIDDEN_SHARE_ON_CPU if is_on_cpu else HIDDEN_SHARE
    yield "kv_overlap_hidden_share", at_least(overlap["hidden_share"], hidden)
    streams, operations = details["streams"], details["operations"]
    yield "switches", at_least(streams["switches"], num_switches)
    done = at_least(operations["operations"], operations["asked"])
    yield "memory_operations", done | {"reached": done["reached"] and operations["passed"]}
    for name, limit in COUNT_LIMITS.items():
        yield name, at_most(streams[name], limit)


def run_machine(num_operations: int) -> dict[str, Any]:
    """The stateful property test of pool, regions, slabs and transfers, with so many operations."""
    command = [sys.executable, "-m", "benchmarks.memory_operations", str(num_operations)]
    started_s = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = done.returncode == 0
    return {
        "asked": num_operations,
        "operations": int(done.stdout) if passed else 0,
        "passed": passed,
        "seconds": time.perf_counter() - started_s,
        "problem": done.stderr.splitlines()[-_LAST_LINES:],
    }


def _in_folder(run: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        return run(Path(folder))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/bench-memory.json"))
    parser.add_argument("--size", type=parse_size_bytes, default=500_000_000, help="of switches")
    parser.add_argument("--rounds", type=int, default=20, help="of everything but streams")
    parser.add_argument("--kv", type=parse_size_bytes, default=128 << 20, help="KV to swap")
    parser.add_argument("--switches", type=int, default=1000, help="under streams")
    parser.add_argument("--operations", type=int, default=100_000, help="of the property test")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
