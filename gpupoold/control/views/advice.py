"""Causes of lateness, and advice. Pure."""

from __future__ import annotations

from gpupoold.control.accounting.model_stats import Counts
from gpupoold.domain import Targets
from gpupoold.units import format_duration

# With so many of its tokens in time a model needs no advice.
GOOD_ATTAINMENT = 0.99


def main_cause(counts: Counts) -> str | None:
    """Return the cause on which late answers lost the most time, None if none was late."""
    cause, late_s = max(counts.lateness.by_cause().items(), key=lambda one: one[1])
    return cause if late_s > 1e-6 else None


def advice(name: str, targets: Targets, counts: Counts) -> list[str]:
    """Return changes that would bring more of a model's tokens in time."""
    found = []
    if counts.refused:
        found.append(
            f"{counts.refused} requests were refused: more may wait if "
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
                "its weights had to be read into host memory: raise memory.model_cache, "
                f"or keep it there with `gpupool cache pin {name}`"
            ]
        case "queueing":
            return [
                "it waited for other models' turns: `gpupool plan` tells how many models this "
                "machine serves in time; looser targets or fewer requests for the others, or "
                "one more device, leave it more turns",
                "a shorter scheduling.quota_max makes turns come round sooner, at more switches",
            ]
        case "switching":
            return [
                "bringing it in took too long: `gpupool switches --slowest` has the stages; fewer "
                "models with work on one device, or smaller weights, leave room to prefetch"
            ]
        case "computing":
            tbt_s = counts.tbt.percentile(0.5)
            shown = "" if tbt_s is None else f" (half take more than {format_duration(tbt_s)})"
            return [
                f"its own steps are slower than the target of {format_duration(targets.tbt_s)} "
                f"between tokens allows{shown}: set a looser target with "
                f"`gpupool set {name} --tbt`, let fewer requests run at a time with "
                "limits.max_live_requests_per_model, or use a faster device"
            ]
    return []
