"""A bounded log of the core's calls; a replay gives the same actions.

The log consists of segments. Each segment begins with a copy of the core, so that earlier entries
can be dropped: when the second segment is full, the first is dropped.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action, Event, Stepped
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.state import State

# Copies, which take some milliseconds with a thousand requests, are rare enough at this size.
MAX_ENTRIES = 10_000
MAX_NAMES = 200_000
"""Requests in the steps of a log, some 90 bytes each: 2,000 steps of 100 requests."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A call of ``handle`` and its result: actions, or the raised error."""

    now_s: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogSegment:
    """The calls since the core had the state ``base``."""

    base: bytes
    entries: list[LogEntry] = field(default_factory=list)

    def core(self) -> Core:
        """Return a copy of the core's state at the beginning."""
        core: Core = pickle.loads(self.base)
        return core


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call, by number from 0, whose result differs from the record."""

    index: int
    recorded: LogEntry
    replayed: LogEntry

    def __str__(self) -> str:
        recorded, replayed = self.recorded, self.replayed
        return (
            f"entry {self.index} at {recorded.now_s} s: recorded "
            f"{recorded.error or list(recorded.actions)}, replayed "
            f"{replayed.error or list(replayed.actions)}"
        )


class RecordedCore:
    """A core that records its latest calls.

    There are ``max_entries`` at most, with ``max_names`` requests in their steps. As soon as there
    were more, at least half of one of the two numbers is kept.
    """

    def __init__(
        self, core: Core, max_entries: int = MAX_ENTRIES, max_names: int = MAX_NAMES
    ) -> None:
        """Record from now on.

        Raises:
            ValueError: ``max_entries`` is less than 2.
        """
        if max_entries < 2:
            raise ValueError(f"max_entries is {max_entries}, must be at least 2")
        state = core.state
        self._core = core
        self._is_from_start = not (state.models or state.devices or state.requests)
        self._max_per_segment = max_entries // 2
        self._max_names_per_segment = max_names // 2
        self._num_names = 0  # in the last segment
        self._segments = [_new_segment(core)]

    @property
    def state(self) -> State:
        """The core's state, for reading."""
        return self._core.state

    @property
    def policy(self) -> Policy:
        """The core's policy."""
        return self._core.policy

    @property
    def segments(self) -> tuple[LogSegment, ...]:
        """The recorded segments in order: one or two."""
        return tuple(self._segments)

    @property
    def is_from_start(self) -> bool:
        """True if the log reaches back to a new core."""
        return self._is_from_start

    def entries(self) -> tuple[LogEntry, ...]:
        """Return all recorded entries in order."""
        return tuple(entry for segment in self._segments for entry in segment.entries)

    def handle(self, events: Iterable[Event], now_s: float) -> list[Action]:
        """Handle events as :meth:`Core.handle` does, with the same errors, and record the call."""
        given = tuple(events)
        segment = self._segments[-1]
        num_names = sum(len(one.request_ids) for one in given if isinstance(one, Stepped))
        is_full = self._num_names + num_names > self._max_names_per_segment
        if len(segment.entries) >= self._max_per_segment or (is_full and segment.entries):
            segment = self._turn_over()
        self._num_names += num_names
        try:
            actions = self._core.handle(given, now_s)
        except Exception as error:
            segment.entries.append(LogEntry(now_s, given, (), _described(error)))
            raise
        segment.entries.append(LogEntry(now_s, given, tuple(actions)))
        return actions

    def _turn_over(self) -> LogSegment:
        self._is_from_start = self._is_from_start and len(self._segments) == 1
        self._num_names = 0
        self._segments = [self._segments[-1], _new_segment(self._core)]
        return self._segments[-1]


def replay_on(core: Core, entries: Iterable[LogEntry]) -> Difference | None:
    """Replay entries on this core, which changes; return the first difference."""
    for index, recorded in enumerate(entries):
        try:
            actions = core.handle(recorded.events, recorded.now_s)
            replayed = LogEntry(recorded.now_s, recorded.events, tuple(actions))
        except Exception as error:
            replayed = LogEntry(recorded.now_s, recorded.events, (), _described(error))
        if (replayed.actions, replayed.error) != (recorded.actions, recorded.error):
            return Difference(index, recorded, replayed)
    return None


def _new_segment(core: Core) -> LogSegment:
    # Six times as fast as copy.deepcopy, and without objects for the garbage collector to walk.
    return LogSegment(pickle.dumps(core, pickle.HIGHEST_PROTOCOL))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
