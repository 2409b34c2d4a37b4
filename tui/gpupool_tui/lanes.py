"""A device's turns and switches on a line of time, the newest to the right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from gpupool_tui.text import Glyphs, Line, Span, cell_len, duration, fit
from gpupoold.api.schemas import DeviceInfo, TurnInfo
from gpupoold.units import clean

NUM_COLOURS = 8
_LEAST_SHARE = 0.1
_LEAST_LABEL = 3  # cells of a name


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time (wall-clock seconds) that a device gave to a model: running, or ``is_switch``."""

    start: float
    end: float
    model: str
    is_switch: bool
    seconds: float
    """The total duration, including time before the line's beginning."""


class Cell(NamedTuple):
    """A cell of a line: its owner, and the share of switches."""

    owner: Stretch | None
    switching: float


_EMPTY = Cell(None, 0.0)
PartsSince = Callable[[float], tuple[list[Stretch], float]]


@dataclass(frozen=True, slots=True)
class Lane:
    """A drawn lane, and the share of switches in its time."""

    line: Line
    switch_share: float


def stretches(
    turns: Iterable[TurnInfo], latest: TurnInfo | None, device: DeviceInfo, now: float
) -> list[Stretch]:
    """Return the finished turns with their switches, and the present turn."""
    found: list[Stretch] = []
    for turn in turns:
        if turn.switch_s > 0:
            begin = turn.began_at - turn.switch_s
            found.append(Stretch(begin, turn.began_at, turn.model, True, turn.switch_s))
        if turn.did_run:
            end = turn.began_at + turn.seconds
            found.append(Stretch(turn.began_at, end, turn.model, False, turn.seconds))
    if device.on_turn is not None:
        start = now if latest is None else min(now, latest.began_at + latest.seconds)
        if device.quota_used_s > 0:
            began = max(start if latest is not None else 0.0, now - device.quota_used_s)
            found.append(Stretch(began, now, device.on_turn, False, now - began))
        elif start < now:
            found.append(Stretch(start, now, device.on_turn, True, now - start))
    return found


def first_cell(now: float, zoom_s: float, width: int) -> int:
    """Return the number of the leftmost cell of a line of ``width`` that ends now.

    Cells begin at whole multiples of ``zoom_s``, so that drawn cells move without changing.
    """
    return math.ceil(now / zoom_s) - width


class LaneCells:
    """Owners of the cells of a device's line, for one length of a cell.

    A cell belongs to the largest user of its time: a switch, a model, or none. Cells before the end
    of the latest finished turn no longer change and are computed once.
    """

    def __init__(self, zoom_s: float) -> None:
        self._zoom_s = zoom_s
        self._kept: dict[int, Cell] = {}
        self._num_final = 0  # cells before this index do not change

    def drawn(self, first: int, count: int, parts: PartsSince) -> list[Cell]:
        """Return ``count`` cells from the one at ``first * zoom_s``.

        ``parts`` returns the stretches that ended after a time, in order, and the time from which
        they may change.
        """
        end = first + count
        begin = max(first, min(self._num_final, end))
        found, is_open_from = parts(begin * self._zoom_s)
        self._kept = {at: cell for at, cell in self._kept.items() if first <= at < begin}
        self._kept |= self._worked_out(found, begin, end - begin)
        self._num_final = max(begin, min(end, math.floor(is_open_from / self._zoom_s)))
        return [self._kept.get(at, _EMPTY) for at in range(first, end)]

    def _worked_out(
        self, parts: Sequence[Stretch], begin: int, count: int
    ) -> Iterator[tuple[int, Cell]]:
        shares: list[dict[int, float]] = [{} for _ in range(count)]
        for index, stretch in enumerate(parts):
            for cell, share in _shares(stretch, begin, self._zoom_s, count):
                shares[cell][index] = shares[cell].get(index, 0.0) + share
        for offset, by_part in enumerate(shares):
            if by_part:
                switching = sum(share for i, share in by_part.items() if parts[i].is_switch)
                yield begin + offset, Cell(_largest(parts, by_part), switching)


def draw_lane(cells: Sequence[Cell], g: Glyphs) -> Lane:
    """A line of cells. Names stand where a run is long enough, times of switches too."""
    spans = [
        _run(owner, sum(1 for _ in group), g)
        for owner, group in groupby(cell.owner for cell in cells)
    ]
    share = sum(cell.switching for cell in cells) / max(1, len(cells))
    return Lane(tuple(spans), min(1.0, share))


def axis(zoom_s: float, width: int, g: Glyphs) -> str:
    """Times under a lane: a mark about every ten cells, ``now`` at the right."""
    step = 20 if width >= 60 else 10
    cells = [" "] * width
    text = "now"
    cells[width - len(text) :] = text
    for back in range(step, width, step):
        at = width - back
        label = f"-{duration(back * zoom_s)}"
        cells[at] = g.tick
        if at + 1 + len(label) < width - len(text) - 1:
            cells[at + 1 : at + 1 + len(label)] = label
    return "".join(cells)


def colour_of(model: str) -> str:
    """Return the palette's word for a model, constant for a name."""
    value = 0
    for byte in model.encode():
        value = (value * 31 + byte) & 0xFFFFFFFF
    return f"m{value % NUM_COLOURS}"


def _shares(stretch: Stretch, begin: int, zoom_s: float, count: int) -> Iterator[tuple[int, float]]:
    """Yield the cells that a stretch covers, counted from ``begin``, with the covered shares."""
    first = max(0, math.floor(stretch.start / zoom_s) - begin)
    last = min(count - 1, math.floor(stretch.end / zoom_s) - begin)
    for cell in range(first, last + 1):
        at = (begin + cell) * zoom_s
        share = min(stretch.end, at + zoom_s) - max(stretch.start, at)
        if share > 0:
            yield cell, share / zoom_s


def _largest(parts: Sequence[Stretch], cell: dict[int, float]) -> Stretch | None:
    if sum(cell.values()) < _LEAST_SHARE:
        return None
    return parts[max(cell, key=lambda index: cell[index])]


def _run(owner: Stretch | None, length: int, g: Glyphs) -> Span:
    if owner is None:
        return Span(g.idle * length, "idle")
    if owner.is_switch:
        label = duration(owner.seconds)
        if length >= cell_len(label) + 2:
            return Span(g.switch + label + g.switch * (length - 1 - len(label)), "switch")
        return Span(g.switch * length, "switch")
    return Span(_named(owner, length, g), f"run {colour_of(owner.model)}")


def _named(owner: Stretch, length: int, g: Glyphs) -> str:
    name, time = clean(owner.model), duration(owner.seconds)
    room = length - 1  # a run ends with a line, which separates two runs
    if room < min(_LEAST_LABEL, cell_len(name)):
        return g.run * length
    if cell_len(name) + 1 + len(time) <= room:
        label = f"{name} {time}"
    else:
        label = fit(name, min(room, cell_len(name)))
    return label + g.run * (length - cell_len(label))
