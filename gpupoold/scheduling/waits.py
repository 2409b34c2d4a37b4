"""Places and waiting times of the requests that have no token yet.

An estimate takes half a millisecond of a busy box, so only the first and the last request of a
*line*, the waiting requests of a model on a device, are estimated. The others are interpolated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from gpupoold.scheduling.state import Request, State
from gpupoold.scheduling.wait_estimate import next_token_in_s


class Wait(NamedTuple):
    """A request's place by arrival among those waiting for a first token on its device, from 1.

    Requests without a device have places of their own. ``first_token_in_s`` is None if unknown.
    """

    place: int
    first_token_in_s: float | None


class Line(NamedTuple):
    """The waiting requests of a model on a device, by arrival, and the places of these requests."""

    requests: Sequence[Request]
    places: Sequence[int]


def lines_of(state: State, request_ids: Collection[str]) -> list[Line]:
    """Return the lines that contain some of these requests."""
    num_on_device: defaultdict[int | None, int] = defaultdict(int)
    lines: defaultdict[tuple[int | None, str], list[tuple[Request, int]]] = defaultdict(list)
    waiting = (one for one in state.requests.values() if not one.num_tokens)
    for request in sorted(waiting, key=lambda one: one.arrival_s):
        num_on_device[request.device] += 1
        place = num_on_device[request.device]
        lines[request.device, request.model.name].append((request, place))
    return [
        Line([one for one, _ in line], [place for _, place in line])
        for line in lines.values()
        if any(one.id in request_ids for one, _ in line)
    ]


def waits_of(state: State, line: Line, now_s: float) -> Iterator[tuple[str, Wait]]:
    """Yield the id and the wait of each request of a line that still waits."""
    pairs = zip(line.requests, line.places, strict=True)
    still = [(one, at) for one, at in pairs if state.requests.get(one.id) is one]
    still = [(one, at) for one, at in still if not one.num_tokens]
    if not still:
        return
    first_s = next_token_in_s(state, still[0][0], now_s)
    last_s = next_token_in_s(state, still[-1][0], now_s) if len(still) > 1 else first_s
    for index, (request, place) in enumerate(still):
        in_s = None
        if first_s is not None and last_s is not None:
            in_s = first_s + (last_s - first_s) * index / max(1, len(still) - 1)
        yield request.id, Wait(place, in_s)
