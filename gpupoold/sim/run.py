"""One point of an experiment: a box, a workload, a policy, and the row it gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpupoold.domain import Targets
from gpupoold.sim.boxes import Box, box_models
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import policy_named
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload

# Time for the last requests to end; whatever has not come by then never came.
_DRAIN_FACTOR = 3


@dataclass(frozen=True, slots=True)
class Point:
    """What to simulate: Poisson arrivals at ``rps`` per model, ShareGPT lengths."""

    box: Box
    num_models: int
    rps: float
    policy: str
    targets: Targets
    duration_s: float
    seed: int


def run_point(point: Point) -> dict[str, object]:
    """The point's row: what was asked for, and what came out.

    Raises:
        UsageError: a point that cannot be simulated.
    """
    models = box_models(point.box, point.num_models, point.targets)
    rates = equal_rates(list(models), point.rps)
    requests = poisson_workload(rates, point.duration_s, sharegpt_lengths(), point.seed)
    policy = policy_named(point.policy)
    box = Simulation(models, policy, point.box.num_devices, point.box.device_bytes)
    started_s = time.perf_counter()
    outcome = box.run(requests, point.duration_s * (1 + _DRAIN_FACTOR))
    return _row(point, requests, outcome, time.perf_counter() - started_s)


def _row(
    point: Point, requests: Sequence[SimRequest], outcome: SimOutcome, wall_s: float
) -> dict[str, object]:
    overall = summarise(outcome.results, outcome.end_s).overall
    devices = outcome.devices
    available_s = len(devices) * point.duration_s
    return {
        "policy": point.policy,
        "devices": f"{point.box.num_devices}x{point.box.gpu}",
        "models": point.num_models,
        "rps": point.rps,
        "requests": len(requests),
        "attainment": overall.attainment,
        "attainment_paper": overall.artifact,
        "ttft_p50_s": overall.ttft_s.p50,
        "ttft_p99_s": overall.ttft_s.p99,
        "tbt_p99_s": overall.tbt_s.p99,
        "switches": sum(device.switches for device in devices),
        "busy_share": sum(device.busy_s for device in devices) / available_s,
        "switching_share": sum(device.switch_s for device in devices) / available_s,
        "wall_s": wall_s,
    }
