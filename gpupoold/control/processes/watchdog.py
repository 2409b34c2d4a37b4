"""Workers that hang: how that is told from work. Pure.

A worker says several times a second how many steps it has made. One that hangs says nothing;
one that spins has a turn and requests, and its steps do not become more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

# Shorter naps than this are the usual distance of two looks on a busy machine.
_SLEPT_S = 2.0


class Watch:
    """What was seen of one run of a worker. Instants are those of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._started_s = self._heard_s = self._moved_s = now_s
        self._is_up = False
        self._num_steps = -1

    def came_up(self, now_s: float) -> None:
        """It can work from now on."""
        self._is_up = True
        self.excuse(now_s)

    def heard(self, now_s: float) -> None:
        self._heard_s = now_s

    def stepped(self, now_s: float, num_steps: int, *, has_work: bool) -> None:
        """It has made so many steps; without work it need not make any."""
        self._heard_s = now_s
        if num_steps != self._num_steps or not has_work:
            self._num_steps, self._moved_s = num_steps, now_s

    def excuse(self, now_s: float) -> None:
        """It need not have said or done anything until now."""
        self._heard_s = self._moved_s = now_s

    def complaint(self, now_s: float, hang_timeout_s: float, start_timeout_s: float) -> str:
        """Why it has to be ended; empty when nothing is wrong."""
        if not self._is_up:
            is_late = now_s - self._started_s > start_timeout_s
            return f"not ready within {start_timeout_s:g} s" if is_late else ""
        if now_s - self._heard_s > hang_timeout_s:
            return f"hung: no sign of life for {hang_timeout_s:g} s"
        if now_s - self._moved_s > hang_timeout_s:
            return f"hung: its turn made no step for {hang_timeout_s:g} s"
        return ""


class Watched(Protocol):
    """A supervised process, as the watchdog knows it."""

    @property
    def watch(self) -> Watch | None:
        """Of the run under way, if there is one."""

    @property
    def is_excused(self) -> bool:
        """True if it does what takes long and has a limit of its own: a load, a benchmark."""


W = TypeVar("W", bound=Watched)


class Watchdog(Generic[W]):
    """Ends what has hung. ``end`` is given a worker and the reason.

    ``limits_s`` are how long a worker may be silent, and how long it may take to come up; they
    are asked for at every look.
    """

    def __init__(
        self,
        watched: Iterable[W],
        end: Callable[[W, str], None],
        limits_s: Callable[[], tuple[float, float]],
    ) -> None:
        self._watched = tuple(watched)
        self._end = end
        self._limits_s = limits_s
        self._looked_s: float | None = None

    def look(self, now_s: float) -> None:
        """End what has hung; to be called every second.

        When this look comes late the daemon has been asleep itself, and knows nothing of
        what the others did meanwhile.
        """
        hang_timeout_s, start_timeout_s = self._limits_s()
        slept_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        was_asleep = slept_s > hang_timeout_s / 2 and slept_s > _SLEPT_S
        self._looked_s = now_s
        for one in self._watched:
            if one.watch is None:
                continue
            if was_asleep or one.is_excused:
                one.watch.excuse(now_s)
            reason = one.watch.complaint(now_s, hang_timeout_s, start_timeout_s)
            if reason:
                self._end(one, reason)
