"""The known state of the daemon: its answers so far, and the thread that asks again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from gpupool_tui.lanes import Cell, LaneCells, Stretch, first_cell, stretches
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import DeviceInfo, Top, TurnInfo
from gpupoold.domain import Event
from gpupoold.errors import GpupoolError

NUM_EVENTS = 1000
NUM_TURNS = 4000
_MINUTES_EVERY = 15
_TIMEOUT_S = 5.0
_RETRY_S = 1.0


@dataclass(slots=True)
class Picture:
    """The ``latest`` answer, and what earlier answers had.

    ``turns`` are by device, oldest first. A restarted daemon restarts its turns, which the process
    id reveals.
    """

    latest: Top
    turns: dict[int, deque[TurnInfo]] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=NUM_EVENTS))
    num_answers: int = 0
    _minutes: dict[str, list[float | None]] = field(default_factory=dict)
    _lanes: dict[tuple[int, float], LaneCells] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add(self.latest)

    @property
    def wants_minutes(self) -> bool:
        """True if the next question should ask for data by the minute, which is not always."""
        return self.num_answers % _MINUTES_EVERY == 0

    def add(self, top: Top) -> None:
        if self.restarted(top):
            self.turns.clear()
            self._lanes.clear()
        self.latest = top
        self.num_answers += 1
        for turn in top.turns:
            kept = self.turns.setdefault(turn.device, deque(maxlen=NUM_TURNS))
            kept.append(turn)
        self.events.extend(top.events)
        for model in top.models:
            if model.usage.attainment_minutes:
                self._minutes[model.usage.name] = model.usage.attainment_minutes

    def restarted(self, top: Top) -> bool:
        """Return whether an answer comes from another daemon process than the previous one."""
        return top.status.pid != self.latest.status.pid

    def minutes_of(self, model: str) -> list[float | None]:
        """Return a model's attainment by the minute from the latest answer with minutes."""
        return self._minutes.get(model, [])

    def cells(self, device: DeviceInfo, zoom_s: float, width: int) -> list[Cell]:
        """A device's line of time up to now, in ``width`` cells of ``zoom_s``."""
        number, now = device.device, self.latest.at

        def parts(since: float) -> tuple[list[Stretch], float]:
            turns = self.turns_since(number, since)
            kept = self.turns.get(number)
            latest = kept[-1] if kept else None
            is_open_from = now if latest is None else latest.began_at + latest.seconds
            return stretches(turns, latest, device, now), is_open_from

        lane = self._lanes.setdefault((number, zoom_s), LaneCells(zoom_s))
        return lane.drawn(first_cell(now, zoom_s, width), width, parts)

    def turns_s(self) -> list[float]:
        """The durations of the kept turns of all devices."""
        return [turn.seconds for kept in self.turns.values() for turn in kept if turn.did_run]

    def turns_since(self, device: int, since: float) -> list[TurnInfo]:
        """Return a device's turns that ended after ``since`` (wall-clock seconds), oldest first."""
        kept = self.turns.get(device, ())
        count = 0
        for turn in reversed(kept):
            if turn.began_at + turn.seconds < since:
                break
            count += 1
        return list(islice(kept, len(kept) - count, None))


def ask(client: AdminClient, picture: Picture) -> Top:
    """Return the daemon's answer with what is new; from a restarted daemon with all its turns."""
    before = picture.latest
    events_after = before.last_event_id
    top = client.top(before.last_turn_id, events_after, minutes=picture.wants_minutes)
    return client.top(0, events_after) if picture.restarted(top) else top


class Poller(threading.Thread):
    """Calls ``on_answer`` with each answer, or ``on_lost`` with the reason for none.

    ``known`` returns the answers so far, None if no answer is wanted now. All callbacks run in this
    thread.
    """

    def __init__(
        self,
        socket_path: Path,
        known: Callable[[], Picture | None],
        interval_s: Callable[[], float],
        on_answer: Callable[[Top], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._socket_path = socket_path
        self._known = known
        self._interval_s = interval_s
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._wake = threading.Event()
        self._is_stopping = False

    def ask_now(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """End the thread, which may be waiting for an answer."""
        self._is_stopping = True
        self._wake.set()

    def run(self) -> None:
        with AdminClient(self._socket_path, _TIMEOUT_S) as client:
            while not self._is_stopping:
                began_s = time.monotonic()
                wait_s = self._interval_s() if self._once(client) else _RETRY_S
                self._wake.wait(max(0.0, wait_s - (time.monotonic() - began_s)))
                self._wake.clear()

    def _once(self, client: AdminClient) -> bool:
        picture = self._known()
        if picture is None:
            return True
        try:
            top = ask(client, picture)
        except GpupoolError as error:
            if not self._is_stopping:
                self._on_lost(error.message)
            return False
        if not self._is_stopping:
            self._on_answer(top)
        return True
