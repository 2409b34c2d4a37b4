"""Times of the scheduling core's decisions in a simulation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpupoold.scheduling.state import State
from gpupoold.sim.engine import Simulation
from gpupoold.sim.workloads import SimRequest


def decision_times_s(
    simulation: Simulation,
    requests: Sequence[SimRequest],
    end_s: float,
    is_counted: Callable[[State], bool] = lambda state: True,
) -> list[float]:
    """Run a simulation; return the seconds of the decisions after which the state is counted."""
    core, taken_s = simulation.core, []
    handle = core.handle

    @functools.wraps(handle)
    def timed(events: Any, now_s: float) -> Any:
        begun_s = time.perf_counter()
        actions = handle(events, now_s)
        ended_s = time.perf_counter()
        if is_counted(core.state):
            taken_s.append(ended_s - begun_s)
        return actions

    core.handle = timed  # type: ignore[method-assign]
    simulation.run(requests, end_s)
    return taken_s
