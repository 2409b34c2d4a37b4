"""All figures of several devices: ``make bench-recovery`` writes ``build/bench-recovery.json``.

Runs requests during kills, migrations, role changes and drains on emulated devices, and a simulated
box that loses a device. Each figure has a limit, except the times until a killed process is
replaced.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.bench.rig import make_checkpoints
from benchmarks.faults import run_faults
from benchmarks.migration import run_migrate
from benchmarks.recovery_sim import run_recovery_sim
from benchmarks.report import at_least, at_most, finish
from benchmarks.restarts import run_restarts
from benchmarks.role_changes import run_role_changes
from gpupoold.units import format_duration

ARCHITECTURES = ["llama", "mixtral", "qwen2", "qwen3"]
MODEL_BYTES = 10_000_000
RESTART_ROUNDS = 5
# The longest delay of the second token by a migration, beyond the copy of the KV.
MIGRATION_LIMIT_S = 0.010
# The largest loss of attainment, ten seconds after the loss of a device.
ALLOWED_LOSS = 0.01


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    arguments = _parse()
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        checkpoints = make_checkpoints(Path(folder), ARCHITECTURES, MODEL_BYTES)
        details = {
            "faults": run_faults(checkpoints, arguments.requests),
            "migrations": run_migrate(checkpoints[0], arguments.rounds),
            "role_changes": run_role_changes(checkpoints, arguments.changes),
            "simulated_box": run_recovery_sim(arguments.rps),
            "restarts": run_restarts([checkpoints[0], checkpoints[2]], RESTART_ROUNDS),
        }
    figures, wall_s = dict(make_figures(details)), time.perf_counter() - started_s
    code = finish(arguments.out, figures, **counts(details), wall_s=wall_s, details=details)
    for name, seconds in details["restarts"]["p50_s"].items():
        print(f"{name}: {format_duration(seconds)} after it was killed")
    return code


def counts(details: Mapping[str, Any]) -> dict[str, int]:
    """What was done, and what was lost, over all runs on emulated devices."""
    faults, changes = details["faults"], details["role_changes"]
    both = (faults, changes)
    return {
        "requests": sum(run["requests"] for run in both),
        "completed": sum(run["completed"] for run in both),
        "differing_texts": sum(run["differing_texts"] for run in both),
        "kills": faults["kills"],
        "frontend_kills": faults["frontend_kills"],
        "role_changes": changes["role_changes"],
        "pages_leaked": sum(run["pages_leaked"] for run in both),
    }


def make_figures(details: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures by name, each beside its limit."""
    for name in ("faults", "role_changes"):
        run = details[name]
        yield f"{name}_completed", at_least(run["completed"], run["requests"])
        yield f"{name}_differing_texts", at_most(run["differing_texts"], 0)
        yield f"{name}_pages_leaked", at_most(run["pages_leaked"], 0)
    yield "frontend_kills", at_least(details["faults"]["frontend_kills"], 1)
    added_s = details["migrations"]["added_beyond_copy_p50_s"]
    yield "hand_over_added_beyond_copy_p50_s", at_most(added_s, MIGRATION_LIMIT_S)
    box = details["simulated_box"]
    wanted = (box["attainment_before"] or 0.0) - ALLOWED_LOSS
    yield "attainment_ten_seconds_later", at_least(box["attainment_after_10_s"] or 0.0, wanted)
    yield "simulated_box_errors", at_most(sum(box["errors"].values()), 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/bench-recovery.json"))
    parser.add_argument("--requests", type=int, default=500, help="under kills")
    parser.add_argument("--rounds", type=int, default=40, help="of hand-overs")
    parser.add_argument("--changes", type=int, default=200, help="of roles, and drains")
    parser.add_argument("--rps", type=float, default=50.0, help="on the simulated box")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
