"""Detection of hung processes. Pure.

A worker reports its number of steps several times a second. A hung worker stops reporting. A
livelocked worker has a turn and requests, but its step counter does not advance. Loads run beside
the steps: a load without an end is a reason of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

# On a busy machine, the time between two checks is often up to this long.
_SLEPT_S = 2.0


class Watch:
    """Observations of one run of a worker; instants of one monotonic clock."""

    def __init__(self, now_s: float) -> None:
        self._started_s = self._seen_s = self._moved_s = now_s
        self._is_up = False
        self._num_steps = -1
        self._load: tuple[str, float] | None = None  # the model, and the start of the load

    def came_up(self, now_s: float) -> None:
        """Record that the process is ready for work."""
        self._is_up = True
        self.excuse(now_s)

    def seen(self, now_s: float) -> None:
        self._seen_s = now_s

    def stepped(self, now_s: float, num_steps: int, *, has_work: bool) -> None:
        """Record the number of steps, which need not grow without work."""
        self._seen_s = now_s
        if num_steps != self._num_steps or not has_work:
            self._num_steps, self._moved_s = num_steps, now_s

    def loads(self, model: str, began_s: float) -> None:
        """Record the present load of a model; an empty ``model`` means no load."""
        self._load = (model, began_s) if model else None

    def excuse(self, now_s: float) -> None:
        """Excuse the silence of the process until now."""
        self._seen_s = self._moved_s = now_s

    def failure_reason(self, now_s: float, hang_timeout_s: float, start_timeout_s: float) -> str:
        """Return why the process must end, empty for a healthy process."""
        if not self._is_up:
            is_late = now_s - self._started_s > start_timeout_s
            return f"not ready within {start_timeout_s:g} s" if is_late else ""
        if now_s - self._seen_s > hang_timeout_s:
            return f"hung: no message for {hang_timeout_s:g} s"
        if now_s - self._moved_s > hang_timeout_s:
            return f"hung: no step in the present turn for {hang_timeout_s:g} s"
        # After the daemon has given up, the worker has time to cancel the load.
        if self._load is not None and now_s - self._load[1] > start_timeout_s + hang_timeout_s:
            return f"hung: the load of {self._load[0]} does not end"
        return ""


class Watched(Protocol):
    """A supervised process for the watchdog."""

    @property
    def watch(self) -> Watch | None:
        """Observations of the present run, if there is one."""

    @property
    def is_excused(self) -> bool:
        """True during work with a separate time limit, such as a benchmark."""


W = TypeVar("W", bound=Watched)


class Watchdog(Generic[W]):
    """Ends hung processes by ``end``, which takes the process and the reason.

    ``limits_s`` returns the longest silence, and the longest time of a start or load, read at each
    check.
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
        self._checked_s: float | None = None

    def check(self, now_s: float) -> None:
        """End hung processes; to be called every second.

        If this call itself is late, the daemon was asleep, and the silence of the processes proves
        nothing.
        """
        hang_timeout_s, start_timeout_s = self._limits_s()
        slept_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        was_asleep = slept_s > hang_timeout_s / 2 and slept_s > _SLEPT_S
        self._checked_s = now_s
        for one in self._watched:
            if one.watch is None:
                continue
            if was_asleep or one.is_excused:
                one.watch.excuse(now_s)
            reason = one.watch.failure_reason(now_s, hang_timeout_s, start_timeout_s)
            if reason:
                self._end(one, reason)
