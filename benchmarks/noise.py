"""Requests near the limits from one client, while another client streams."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.fuzz import Outcome, send_malformed_requests
from benchmarks.malformed_requests import MalformedRequest
from benchmarks.near_limits import near_limits, ordinary
from benchmarks.neighbour import Felt, Neighbour
from benchmarks.private_daemon import PrivateDaemon
from gpupoold.api.schemas import TurnInfo

MAX_BODY_BYTES = 10_000_000
MORE_PAUSE_S = 0.1
_STREAMS = 2
_ALONE_S = 10.0
NEAR_AT_ONCE = 4
_MAX_TURNS = 4096
NEAR_PATIENCE_S = 5.0
_LAG = "gpupool_event_loop_lag_seconds"
_LATE_S = "1.0"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the neighbour felt alone, beside the other client, and beside ordinary requests.

    The pauses are less the time in which the neighbour's device served another model.
    """

    alone: Felt
    beside: Felt
    beside_ordinary: Felt
    pause_s: float
    pause_beside_ordinary_s: float

    def harm(self, *, has_same_answers: bool) -> Iterator[str]:
        """Name what the neighbour lost by the other client, pauses aside."""
        for error in self.beside.failed[:5]:
            yield f"a stream of the neighbour failed: {error}"
        if has_same_answers and self.beside.differing:
            yield f"{self.beside.differing} answers of the neighbour differ"

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def beside_a_neighbour(
    daemon: PrivateDaemon, count: int, seed: int, models: Sequence[str]
) -> tuple[Outcome, Comparison]:
    """Send ``count`` requests near the limits to a daemon that a neighbour streams from, after as
    many ordinary ones of the same sizes.

    The neighbour asks the first of ``models`` and the other client the rest. There is a device
    for each, but a model with much to do is given turns on both.
    """
    port = int(daemon.http_url.rpartition(":")[2])
    # Made before the measurement: on few cores the generation would slow the neighbour's streams.
    noise = list(near_limits(seed, count, models[1:], MAX_BODY_BYTES))
    usual = list(ordinary(noise, models[1:]))
    neighbour = Neighbour(port, models[0], _STREAMS)
    time.sleep(_ALONE_S)
    alone = neighbour.stop()
    _, usually, usual_pause_s = _beside(daemon, usual, models[0])
    outcome, beside, pause_s = _beside(daemon, noise, models[0])
    return outcome, Comparison(alone, beside, usually, pause_s, usual_pause_s)


def _beside(
    daemon: PrivateDaemon, requests: Sequence[MalformedRequest], model: str
) -> tuple[Outcome, Felt, float]:
    """Send requests while a neighbour streams from ``model``; return also its longest pause."""
    port = int(daemon.http_url.rpartition(":")[2])
    neighbour = Neighbour(port, model, _STREAMS)
    outcome = asyncio.run(send_malformed_requests(port, requests, NEAR_AT_ONCE, NEAR_PATIENCE_S))
    felt = neighbour.stop()
    with daemon.client() as client:
        turns = client.turns(limit=_MAX_TURNS)
    return outcome, felt, longest_unshared_s(felt, turns, model)


def longest_unshared_s(felt: Felt, turns: Sequence[TurnInfo], model: str) -> float:
    """Return the longest pause less what of it other models had of the device that the
    neighbour's ``model`` was on."""
    by_device: dict[int, list[TurnInfo]] = {}
    for turn in sorted(turns, key=lambda turn: turn.began_at):
        by_device.setdefault(turn.device, []).append(turn)
    given_up = [
        (before.began_at + before.seconds, after.began_at)
        for row in by_device.values()
        for before, after in pairs_around_others(row, model)
    ]
    noted_s = [
        pause_s - sum(_overlap_s(began_at, began_at + pause_s, *one) for one in given_up)
        for began_at, pause_s in felt.pauses
    ]
    return max(noted_s, default=felt.longest_pause_s)


def pairs_around_others(
    turns: Sequence[TurnInfo], model: str
) -> Iterator[tuple[TurnInfo, TurnInfo]]:
    """Yield the turns of ``model`` on one device, each with the next, that have others between."""
    own = [index for index, turn in enumerate(turns) if turn.model == model]
    for before, after in itertools.pairwise(own):
        if after > before + 1:
            yield turns[before], turns[after]


def _overlap_s(began_s: float, ended_s: float, other_began_s: float, other_ended_s: float) -> float:
    return max(0.0, min(ended_s, other_ended_s) - max(began_s, other_began_s))


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
