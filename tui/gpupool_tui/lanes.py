"""A device's turns and switches on a line of time, the newest to the right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpupool_tui.glyphs import Glyphs
from gpupool_tui.numbers import duration
from gpupool_tui.text import Line, Span, cell_len, clean, fit
from gpupoold.admin.models import DeviceInfo
from gpupoold.admin.models_top import TurnInfo

NUM_COLOURS = 8
_LEAST_SHARE = 0.1
_LEAST_LABEL = 3  # cells of a name


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time (wall-clock seconds) that a device gave to a model: running it, or ``is_switch``."""

    start: float
    end: float
    model: str
    is_switch: bool
    seconds: float
    """What it took or has taken in all, also before the line's beginning."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A drawn lane, and the share of its time that switches took."""

    line: Line
    switch_share: float


def stretches(turns: Iterable[TurnInfo], device: DeviceInfo | None, now: float) -> list[Stretch]:
    """The turns that are over with their switches, and the one under way."""
    found: list[Stretch] = []
    for turn in turns:
        if turn.switch_s > 0:
            begin = turn.began_at - turn.switch_s
            found.append(Stretch(begin, turn.began_at, turn.model, True, turn.switch_s))
        if turn.did_run:
            end = turn.began_at + turn.seconds
            found.append(Stretch(turn.began_at, end, turn.model, False, turn.seconds))
    if device is not None and device.on_turn is not None:
        last = found[-1].end if found else now
        if device.quota_used_s > 0:
            start = max(now - device.quota_used_s, last if last < now else now)
            found.append(Stretch(start, now, device.on_turn, False, now - start))
        elif last < now:
            found.append(Stretch(last, now, device.on_turn, True, now - last))
    return found


def right_edge(now: float, zoom_s: float) -> float:
    """Where the line ends: cells begin at whole multiples of ``zoom_s``, so that what has been
    drawn only moves, and does not change."""
    return math.ceil(now / zoom_s) * zoom_s


def draw_lane(parts: Sequence[Stretch], now: float, zoom_s: float, width: int, g: Glyphs) -> Lane:
    """The last ``width`` cells of ``zoom_s`` each.

    A cell belongs to what took most of it: a switch, a model, or nothing. Names stand where a
    run is long enough, times of switches too.
    """
    end = right_edge(now, zoom_s)
    start = end - width * zoom_s
    owners = _owners(parts, start, zoom_s, width)
    spans: list[Span] = []
    position = 0
    for owner, group in groupby(owners):
        length = sum(1 for _ in group)
        spans.append(_run(owner, length, g))
        position += length
    switching = sum(
        max(0.0, min(one.end, now) - max(one.start, start)) for one in parts if one.is_switch
    )
    shown_s = max(now - start, zoom_s)
    return Lane(tuple(spans), min(1.0, switching / shown_s))


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
    """The palette's word for a model: the same for the same name, wherever it is seen."""
    value = 0
    for byte in model.encode():
        value = (value * 31 + byte) & 0xFFFFFFFF
    return f"m{value % NUM_COLOURS}"


Owner = Stretch | None


def _owners(parts: Sequence[Stretch], start: float, zoom_s: float, width: int) -> list[Owner]:
    shares: list[dict[int, float]] = [{} for _ in range(width)]
    for index, one in enumerate(parts):
        for cell, share in _cells(one, start, zoom_s, width):
            shares[cell][index] = shares[cell].get(index, 0.0) + share
    return [_largest(parts, cell) for cell in shares]


def _cells(one: Stretch, start: float, zoom_s: float, width: int) -> Iterator[tuple[int, float]]:
    first = max(0, math.floor((one.start - start) / zoom_s))
    last = min(width - 1, math.floor((one.end - start) / zoom_s))
    for cell in range(first, last + 1):
        begin = start + cell * zoom_s
        share = min(one.end, begin + zoom_s) - max(one.start, begin)
        if share > 0:
            yield cell, share / zoom_s


def _largest(parts: Sequence[Stretch], cell: dict[int, float]) -> Owner:
    if not cell or sum(cell.values()) < _LEAST_SHARE:
        return None
    return parts[max(cell, key=lambda index: cell[index])]


def _run(owner: Owner, length: int, g: Glyphs) -> Span:
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
    room = length - 1  # a run ends with its line, so that two of them can be told apart
    if room < min(_LEAST_LABEL, cell_len(name)):
        return g.run * length
    if cell_len(name) + 1 + len(time) <= room:
        label = f"{name} {time}"
    else:
        label = fit(name, min(room, cell_len(name)))
    return label + g.run * (length - cell_len(label))
