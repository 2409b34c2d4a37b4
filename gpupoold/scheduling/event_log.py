"""A bounded log of what the core was told and what it answered; replayed, it tells the same.

The log is kept in segments. Each begins with a copy of the core as it was then, so that
what came before can be forgotten: two are kept, and when the younger is full the older goes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpupoold.scheduling.actions import Action
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Event

# A copy of a core with a thousand requests takes some milliseconds: rare enough at this rate.
MAX_STIMULI = 10_000


@dataclass(frozen=True, slots=True)
class Stimulus:
    """One call of ``handle`` and its answer: actions, or the error that it raised."""

    now_s: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """What the core was told after it was as in ``base``."""

    base: bytes
    stimuli: list[Stimulus] = field(default_factory=list)

    def core(self) -> Core:
        """A new copy of the core as it was at the beginning."""
        core: Core = pickle.loads(self.base)
        return core


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call, by number from 0, that was answered otherwise than recorded."""

    index: int
    recorded: Stimulus
    replayed: Stimulus

    def __str__(self) -> str:
        recorded, replayed = self.recorded, self.replayed
        return (
            f"stimulus {self.index} at {recorded.now_s} s: recorded "
            f"{recorded.error or list(recorded.actions)}, replayed "
            f"{replayed.error or list(replayed.actions)}"
        )


class RecordedCore:
    """A core that remembers its last ``max_stimuli`` calls; at least half of so many."""

    def __init__(self, core: Core, max_stimuli: int = MAX_STIMULI) -> None:
        """Record from now on.

        Raises:
            ValueError: ``max_stimuli`` is less than 2.
        """
        if max_stimuli < 2:
            raise ValueError(f"a log of {max_stimuli} stimuli: it takes at least 2")
        state = core.state
        self.core = core
        self._is_from_start = not (state.models or state.devices or state.requests)
        self._max_per_segment = max_stimuli // 2
        self._segments = [_new_segment(core)]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is remembered, in order: one segment or two."""
        return tuple(self._segments)

    @property
    def is_from_start(self) -> bool:
        """True if nothing has been forgotten since the core was new."""
        return self._is_from_start

    def stimuli(self) -> tuple[Stimulus, ...]:
        """All that are remembered, in order."""
        return tuple(one for segment in self._segments for one in segment.stimuli)

    def handle(self, events: Iterable[Event], now_s: float) -> list[Action]:
        """As :meth:`Core.handle`, and raises the same."""
        told = tuple(events)
        segment = self._segments[-1]
        if len(segment.stimuli) >= self._max_per_segment:
            segment = self._turn_over()
        try:
            actions = self.core.handle(told, now_s)
        except Exception as error:
            segment.stimuli.append(Stimulus(now_s, told, (), _described(error)))
            raise
        segment.stimuli.append(Stimulus(now_s, told, tuple(actions)))
        return actions

    def _turn_over(self) -> Segment:
        self._is_from_start = self._is_from_start and len(self._segments) == 1
        self._segments = [self._segments[-1], _new_segment(self.core)]
        return self._segments[-1]


def replay(segment: Segment) -> Difference | None:
    """The first difference between a segment and what its core does when told the same again."""
    return replay_on(segment.core(), segment.stimuli)


def replay_on(core: Core, stimuli: Iterable[Stimulus]) -> Difference | None:
    """As :func:`replay`, on this core, which changes."""
    for index, recorded in enumerate(stimuli):
        try:
            actions = core.handle(recorded.events, recorded.now_s)
            replayed = Stimulus(recorded.now_s, recorded.events, tuple(actions))
        except Exception as error:
            replayed = Stimulus(recorded.now_s, recorded.events, (), _described(error))
        if (replayed.actions, replayed.error) != (recorded.actions, recorded.error):
            return Difference(index, recorded, replayed)
    return None


def _new_segment(core: Core) -> Segment:
    # Six times as fast as copy.deepcopy, and nothing for the garbage collector to walk.
    return Segment(pickle.dumps(core, pickle.HIGHEST_PROTOCOL))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
