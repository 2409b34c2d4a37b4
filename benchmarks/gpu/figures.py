"""Figures with their limits. The name of a figure ends in the unit. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Limits of a GPU's figures. A switch from host memory must reach a share of the bandwidth of plain
# copies, measured in the same run, and may take some additional time.
HOST_CACHED_SHARE = 0.9
HOST_CACHED_EXTRA_S = 0.1
KV_SHARE = 0.8
PREFETCHED_S = 0.05
RESIDENT_S = 0.005
LANE_SHARE = 0.9
HIDDEN_SHARE = 0.5
DECODE_RATIO = 0.98
# Of groups of GPUs: beside the plain copies of the slowest rank, and beside vLLM with as many GPUs.
GROUP_SWITCH_COPIES = 1.3
GROUP_SWITCH_EXTRA_S = 0.005
GROUP_DECODE_RATIO = 0.95
SLEEP_RATIO = 3.0
GOODPUT_RATIO = 2.0
ATTAINMENT = 0.9
SIMULATED_DIFFERENCE = 0.03

Figure = dict[str, Any]


def measured(value: float | int) -> Figure:
    """A figure that has no limit."""
    return {"measured": value, "limit": None, "reached": None}


def at_most(value: float | int, limit: float | int) -> Figure:
    """A figure that is to be small."""
    return {"measured": value, "limit": limit, "reached": value <= limit}


def at_least(value: float | int, limit: float | int) -> Figure:
    """A figure that is to be large."""
    return {"measured": value, "limit": limit, "reached": value >= limit}


def host_cached_limit_s(weight_bytes: float, kv_bytes: float, copy_bytes_per_s: float) -> float:
    """How long a switch may take that moves so many bytes, by the copies of the same run."""
    weights_s = weight_bytes / (HOST_CACHED_SHARE * copy_bytes_per_s)
    return weights_s + kv_bytes / (KV_SHARE * copy_bytes_per_s) + HOST_CACHED_EXTRA_S


def group_switch_limit_s(copies_s: float) -> float:
    """How long a group's switch may take, when plain copies on all ranks at once take so long."""
    return GROUP_SWITCH_COPIES * copies_s + GROUP_SWITCH_EXTRA_S


def derived(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """What two pieces of one run say together: switches against sleep and wake, and policies."""
    found: dict[str, Figure] = {}
    for name in figures:
        shape, _, rest = name.partition("_")
        if rest not in ("sleep_and_wake_p50_s", "sleep_level_2_and_wake_p50_s"):
            continue
        switch = figures.get(f"{shape}_host_cached_switch_p50_s")
        if switch is not None and switch["measured"] > 0:
            ratio = figures[name]["measured"] / switch["measured"]
            what = rest.removesuffix("_p50_s")
            found[f"{shape}_{what}_over_switch_ratio"] = at_least(ratio, SLEEP_RATIO)
    return found | _policies(figures)


def goodput_rps(attainments: Mapping[float, float], wanted: float = ATTAINMENT) -> float | None:
    """The rate at which attainment falls under ``wanted``; between two rates, on a line.

    None where it never does, or does at the lowest rate already: then nothing is known but a
    bound.
    """
    before: tuple[float, float] | None = None
    for rate_rps, attainment in sorted(attainments.items()):
        if attainment < wanted:
            if before is None:
                return None
            share = (before[1] - wanted) / (before[1] - attainment)
            return before[0] + share * (rate_rps - before[0])
        before = (rate_rps, attainment)
    return None


def _policies(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    ours, theirs = (
        figures.get(f"mixed_{policy}_attainment") for policy in ("gpupool", "request-level")
    )
    if ours is not None and theirs is not None:
        value = ours["measured"] - theirs["measured"]
        found["mixed_attainment_over_request-level_difference"] = at_least(value, 0.0)
    best = _first(figures, "mixed_gpupool_goodput", ("rps", "at_least_rps"))
    rival = _first(figures, "mixed_request-level_goodput", ("rps", "at_most_rps"))
    if best is not None and rival is not None:
        found["mixed_goodput_over_request-level_ratio"] = at_least(best / rival, GOODPUT_RATIO)
    return found


def _first(figures: Mapping[str, Figure], name: str, units: Sequence[str]) -> float | None:
    """The figure of that name, or the bound of it: a ratio of bounds is a bound itself."""
    values = (
        figures[f"{name}_{unit}"]["measured"] for unit in units if f"{name}_{unit}" in figures
    )
    return next(values, None)
