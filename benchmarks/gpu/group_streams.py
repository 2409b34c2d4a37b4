"""Streams of groups of GPUs: migrations between two groups, or the death of each rank of a group.

Every answer must be complete and equal to the undisturbed answer of the same groups. Batches are
mixed, so vLLM computes in its batch-invariant mode.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, arguments, setting_of
from benchmarks.groups import Goal, run_phases

PHASES = ("migrations", "kills")
_SHAPES = ("1B", "3B")
_ROOM = 1.6  # of the larger model's weights, on each group
_DRY_SLACK_BYTES = 4 << 20
_MAX_MODEL_LEN = 512
_KV_HOST_BYTES = 2 << 30
_DRY_KV_HOST_BYTES = 64 << 20
_NUM_MIGRATIONS = 50
_DRY_NUM_MIGRATIONS = 5
# Time left for the end of the last answers and of the daemon.
_END_S = 20.0


def run(setting: Setting, phase: str) -> None:
    """Measure and report."""
    if not setting.is_emulated:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    num_groups = 2 if phase == "migrations" else 1
    largest = max(map(setting.weight_bytes, _SHAPES))
    kv_host_bytes = _DRY_KV_HOST_BYTES if setting.is_dry else _KV_HOST_BYTES
    config = setting.device(int(_ROOM * largest), _DRY_SLACK_BYTES, num_groups)
    # Snapshots for groups of one size are shared; some more, for the time of a load.
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes(2 * _SHAPES)}\n"
    config += f"kv_host = {kv_host_bytes}\n"
    with setting.daemon(config, starts_quickly=True) as daemon:
        names = []
        for shape in _SHAPES:
            path = setting.checkpoint(shape)
            add_timed(setting, daemon, path.name, path, _MAX_MODEL_LEN)
            names.append(path.name)
        wanted = _DRY_NUM_MIGRATIONS if setting.is_dry else _NUM_MIGRATIONS
        goal = Goal(wanted, 0, max(1.0, setting.left_s - _END_S))
        measured = asyncio.run(run_phases(daemon, names, [phase], goal))[phase]
    label = setting.label(phase)
    found = phase_figures(label, measured)
    if phase == "migrations":
        found[f"{label}_done"] = figures.at_least(measured["num_migrations"], wanted)
    else:
        found[f"{label}_done"] = figures.at_least(measured["num_kills"], setting.num_gpus)
    setting.report.add(found, **{phase: measured})


def phase_figures(label: str, measured: Mapping[str, Any]) -> dict[str, figures.Figure]:
    """What holds for the streams of each phase."""
    lost = measured["requests"] - measured["completed"]
    found = {
        f"{label}_requests": figures.at_least(measured["requests"], 1),
        f"{label}_requests_lost": figures.at_most(lost, 0),
        f"{label}_answers_differing": figures.at_most(measured["differing_texts"], 0),
        f"{label}_pages_leaked": figures.at_most(measured["pages_leaked"], 0),
    }
    if (pause_s := measured["longest_pause_p50_s"]) is not None:
        found[f"{label}_longest_pause_p50_s"] = figures.measured(pause_s)
    return found


def main() -> int:
    """Run it; see the module."""
    parser = arguments(__doc__)
    parser.add_argument("phase", choices=PHASES)
    args = parser.parse_args()
    run(setting_of(args), args.phase)
    return 0


if __name__ == "__main__":
    sys.exit(main())
