"""Errors of the waiting times estimated for refused clients, measured in the simulator.

Prints a JSON line per box and load. Estimates are made at arrivals and compared with the simulated
times; an error is estimate minus fact, in seconds. "first token" is the time to the first token of
the arriving request. As in the daemon, live requests are bounded. When the bound is reached,
requests are refused, and the estimates are the times until a request, and a quarter of the bound,
can be accepted.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action
from gpupoold.scheduling.wait_estimate import drain_of, first_token_in_s
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.host import host_memory
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.presets import poisson_panel
from gpupoold.sim.scenario import Overrides, Scenario, build_scenario
from gpupoold.stats.histogram import percentile

# Box, models, requests/s of each model, bound of live requests: from light load to overload.
LOADS = (
    ("16xH800", 40, 0.1, 1000),
    ("16xH800", 120, 0.1, 1000),
    ("16xH800", 200, 0.1, 300),
    ("1xH800", 1, 4.0, 1000),
    ("1xH800", 1, 40.0, 64),
    ("1xH800", 1, 40.0, 256),
    ("1xH800", 4, 0.5, 1000),
    ("1xH800", 4, 4.0, 64),
    ("1xH800", 12, 0.3, 32),
)
_DRAIN_EVERY = 10  # in refusals


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """One estimate: ``in_s`` from ``at_s`` on, ``num`` will have ended."""

    at_s: float
    num: int
    in_s: float


@dataclass(frozen=True, slots=True)
class FirstTokenAsked:
    """One estimate: the first token ``in_s`` after ``at_s``, when the core learnt of the request.

    A request whose model is read from disk first is known to the core after the read.
    """

    at_s: float
    in_s: float


@dataclass(slots=True)
class WatchedCore:
    """A core that is asked for estimates before it hears of a request."""

    core: Core
    bound: int
    on_refused: Callable[[str], None]
    num_refused: int = 0
    first_tokens: dict[str, FirstTokenAsked] = field(default_factory=dict)
    drains: list[DrainAsked] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    def handle(self, events: Iterable[e.Event], now_s: float) -> list[Action]:
        """As the core's."""
        told = [event for event in events if not self._refuses(event, now_s)]
        for event in told:
            if isinstance(event, e.Arrived):
                self._ask_first_token(event, now_s)
            elif isinstance(event, e.Ended):
                self.ended_s.append(now_s)
        return self.core.handle(told, now_s)

    def _refuses(self, event: e.Event, now_s: float) -> bool:
        if not isinstance(event, e.Arrived) or len(self.core.state.requests) < self.bound:
            return False
        self.num_refused += 1
        self.on_refused(event.request_id)
        if self.num_refused % _DRAIN_EVERY == 0:
            self._ask_drain(now_s)
        return True

    def _ask_first_token(self, event: e.Arrived, now_s: float) -> None:
        state = self.core.state
        wait_s = first_token_in_s(state, state.models[event.model], event.prompt_tokens, now_s)
        assert wait_s is not None
        self.first_tokens[event.request_id] = FirstTokenAsked(now_s, wait_s)

    def _ask_drain(self, now_s: float) -> None:
        drain = drain_of(self.core.state, None, now_s)
        for num in (1, self.bound // 4):
            in_s = drain.seconds_until(num)
            assert in_s is not None
            self.drains.append(DrainAsked(now_s, num, in_s))

    def drain_facts(self, num: int) -> list[tuple[float, float]]:
        """Estimates and facts, of those that came to pass."""
        pairs = []
        for asked in self.drains:
            index = bisect_right(self.ended_s, asked.at_s) + num - 1
            if asked.num == num and index < len(self.ended_s):
                pairs.append((asked.in_s, self.ended_s[index] - asked.at_s))
        return pairs


def scenario_of(box: str, num_models: int, rps: float, duration_s: float) -> Scenario:
    """Poisson arrivals with ShareGPT lengths; ``rps`` requests/s for each model."""
    wanted = Overrides(box=parse_box(box), models=(num_models,), rps=(rps,), duration_s=duration_s)
    [point, *_] = poisson_panel().changed(wanted).points()
    return build_scenario(point)


def measure(scenario: Scenario, bound: int, policy: str = "gpupool") -> dict[str, object]:
    """Run it, and compare."""
    box = scenario.point.panel.box
    made = make_policy(policy, PolicyOptions())
    host = host_memory(box)
    kv_host_bytes = host.kv_bytes_per_gpu * box.tensor_parallel_size
    device = BoxDevice(box.device_bytes, kv_host_bytes=kv_host_bytes)
    simulation = Simulation(scenario.models, made, [device] * box.num_devices, host=host)
    watched = WatchedCore(simulation.core, bound, simulation.count_end)
    simulation.core = watched  # type: ignore[assignment]  # it answers as a core does
    outcome = simulation.run(scenario.requests, scenario.end_s)
    first = [
        (asked.in_s, one.token_times_s[0] - asked.at_s)
        for one in outcome.results
        if one.token_times_s and (asked := watched.first_tokens[one.request.id])
    ]
    return {
        "requests": len(scenario.requests),
        "refused": watched.num_refused,
        "first_token": errors(first),
        "drain_one": errors(watched.drain_facts(1)),
        "drain_quarter": errors(watched.drain_facts(bound // 4)),
    }


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float | int | None]:
    """Of pairs of estimate and fact."""
    absolute = [abs(estimate - fact) for estimate, fact in pairs]
    facts = [fact for _, fact in pairs]
    return {
        "n": len(pairs),
        "fact_p50_s": _rounded(percentile(facts, 0.5)),
        "fact_p90_s": _rounded(percentile(facts, 0.9)),
        "bias_p50_s": _rounded(percentile([a - b for a, b in pairs], 0.5)),
        "error_p50_s": _rounded(percentile(absolute, 0.5)),
        "error_p90_s": _rounded(percentile(absolute, 0.9)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def main() -> None:
    """Print a line for every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--policy", default="gpupool")
    arguments = parser.parse_args()
    for box, num_models, rps, bound in LOADS:
        scenario = scenario_of(box, num_models, rps, arguments.duration)
        row = {"box": box, "models": num_models, "rps": rps, "bound": bound}
        print(json.dumps(row | measure(scenario, bound, arguments.policy)), flush=True)


if __name__ == "__main__":
    main()
