"""A client that sends requests near the limits beside one that streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fuzz import Outcome, send_mutants
from benchmarks.near_limits import near_limits
from benchmarks.neighbour import Felt, Neighbour

MAX_BODY_BYTES = 10_000_000
MORE_PAUSE_S = 0.1
_STREAMS = 2
_AT_ONCE = 4
_PATIENCE_S = 5.0
_LAG = "gpupool_event_loop_lag_seconds"
_LATE_S = "1.0"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the neighbour felt alone, and beside the other client for as long or longer."""

    alone: Felt
    beside: Felt

    def harm(self, *, has_same_answers: bool) -> Iterator[str]:
        """Name what the neighbour felt of the other client."""
        for error in self.beside.failed[:5]:
            yield f"a stream of the neighbour failed: {error}"
        if has_same_answers and self.beside.differing:
            yield f"{self.beside.differing} answers of the neighbour differ"
        more_s = self.beside.longest_pause_s - self.alone.longest_pause_s
        if more_s > MORE_PAUSE_S:
            yield f"the neighbour's longest pause is {more_s * 1e3:.0f} ms longer than alone"

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def beside_a_neighbour(
    port: int, count: int, seed: int, models: Sequence[str]
) -> tuple[Outcome, Comparison]:
    """Send ``count`` requests near the limits to a daemon that a neighbour streams from.

    The neighbour asks the first of ``models`` and the other client the rest, which have a device
    of their own: who shares a device shares its time, as the models' targets have it.
    """
    # They are made before: on few cores making them would be what the neighbour feels.
    noise = list(near_limits(seed, count, models[1:], MAX_BODY_BYTES))
    neighbour = Neighbour(port, models[0], _STREAMS)
    outcome = asyncio.run(send_mutants(port, noise, _AT_ONCE, _PATIENCE_S))
    beside = neighbour.stop()
    neighbour = Neighbour(port, models[0], _STREAMS)
    time.sleep(max(10.0, min(outcome.wall_s, 60.0)))
    return outcome, Comparison(neighbour.stop(), beside)


def late_loops(exposition: str) -> dict[str, int]:
    """Return how often each process's event loop was late by more than a second."""
    total: dict[str, int] = {}
    in_time: dict[str, int] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples if family.name == _LAG else ():
            process = sample.labels["process"]
            if sample.name.endswith("_count"):
                total[process] = int(sample.value)
            elif sample.labels.get("le") == _LATE_S:
                in_time[process] = int(sample.value)
    return {process: number - in_time[process] for process, number in total.items()}
