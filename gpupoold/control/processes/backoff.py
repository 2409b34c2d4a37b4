"""Waiting times before restarts of an ended process. Pure."""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 60.0
STABLE_AFTER_S = 60.0


class Backoff:
    """The backoff of one process.

    A process that ran for ``STABLE_AFTER_S`` restarts at once; repeated short runs double the wait
    up to ``max_s``.
    """

    def __init__(self, max_s: float = MAX_S) -> None:
        self._max_s = max_s
        self._next_s = 0.0

    def after(self, ran_s: float, *, is_excused: bool = False) -> float:
        """Return the seconds to wait after a run of ``ran_s``.

        An excused end says nothing about the next run and needs no wait.
        """
        if is_excused:
            return 0.0
        if ran_s >= STABLE_AFTER_S:
            self._next_s = 0.0
        wait_s = self._next_s
        self._next_s = min(max(FIRST_S, 2 * wait_s), self._max_s)
        return wait_s
