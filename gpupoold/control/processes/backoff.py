"""How long to wait before a process that has ended is started again. Pure."""

from __future__ import annotations

FIRST_S = 1.0
MAX_S = 60.0
STABLE_AFTER_S = 60.0


class Backoff:
    """Of one process. What ran for ``STABLE_AFTER_S`` is started again at once; what ends again
    and again waits twice as long every time, ``max_s`` at most."""

    def __init__(self, max_s: float = MAX_S) -> None:
        self._max_s = max_s
        self._next_s = 0.0

    def after(self, ran_s: float, *, is_excused: bool = False) -> float:
        """Seconds to wait after a run of ``ran_s``.

        Excused: its end says nothing of the next run, and nobody waits for it.
        """
        if is_excused:
            return 0.0
        if ran_s >= STABLE_AFTER_S:
            self._next_s = 0.0
        wait_s = self._next_s
        self._next_s = min(max(FIRST_S, 2 * wait_s), self._max_s)
        return wait_s
