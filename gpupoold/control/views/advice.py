"""Causes of lateness, and advice. Pure."""

from __future__ import annotations

from gpupoold.control.accounting.model_stats import Counts
from gpupoold.domain import Targets
from gpupoold.units import format_duration

# Attainment above which a model needs no advice.
GOOD_ATTAINMENT = 0.99


def main_cause(counts: Counts) -> str | None:
    """Return the cause on which late answers lost the most time, None if all were in time."""
    cause, late_s = max(counts.lateness.by_name().items(), key=lambda one: one[1])
    return cause if late_s > 1e-6 else None


def advice(name: str, targets: Targets, counts: Counts) -> list[str]:
    """Return changes that would bring more of a model's tokens in time."""
    found = []
    if counts.refused:
        found.append(
            f"{counts.refused} requests were refused: more requests may wait if "
            "limits.max_live_requests_per_model and limits.max_live_requests are higher"
        )
    if counts.dropped:
        found.append(f"{counts.dropped} requests were dropped as too late: see limits.drop_late")
    attainment = counts.attainment
    if attainment is not None and attainment < GOOD_ATTAINMENT:
        found += _against(main_cause(counts), name, targets, counts)
    return found


def _against(cause: str | None, name: str, targets: Targets, counts: Counts) -> list[str]:
    match cause:
        case "loading":
            return [
                "the weights had to be read into host memory: raise memory.model_cache, "
                f"or keep the weights in host memory with `gpupool cache pin {name}`"
            ]
        case "queueing":
            return [
                "requests waited for other models' turns: `gpupool plan` shows how many models "
                "this machine serves in time; looser targets or fewer requests of other models, "
                "or another device, give the model more turns",
                "a shorter scheduling.quota_max makes turns more frequent, with more switches",
            ]
        case "switching":
            return [
                "switches to the model took too long: `gpupool switches --slowest` has the "
                "stages; fewer models with work on a device, or smaller weights, leave memory to "
                "prefetch"
            ]
        case "computing":
            tbt_s = counts.tbt.percentile(0.5)
            shown = "" if tbt_s is None else f" (half take more than {format_duration(tbt_s)})"
            return [
                f"the model's steps are slower than the target of "
                f"{format_duration(targets.tbt_s)} between tokens{shown}: set a looser target with "
                f"`gpupool set {name} --tbt`, run fewer requests at a time with "
                "limits.max_live_requests_per_model, or use a faster device"
            ]
    return []
