"""Circuit breakers for models that crash workers or cannot be loaded. Pure.

A breaker is *open* after crashes attributed to the model, or when no worker could load the model;
*half-open* when its wait is over and the model is being loaded; *closed* after success. A crash
soon afterwards opens the breaker again with twice the wait. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gpupoold.control.processes.crash_attribution import Death

MAX_CRASHES = 2
WINDOW_S = 600.0
MAX_CONVICTED = 3
"""Number of consecutive requests that crash a worker, each alone, before the model is at fault."""
FIRST_WAIT_S = 30.0
MAX_WAIT_S = 3600.0


class _State(Enum):
    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(slots=True)
class _Breaker:
    state: _State = _State.CLOSED
    is_blocking: bool = True  # while open, no worker may load the model
    reason: str = ""
    wait_s: float = 0.0  # the latest wait; 0 before the first wait, or long after the latest
    retry_at_s: float = 0.0
    closed_at_s: float = 0.0
    crashes: list[tuple[float, int]] = field(default_factory=list)  # (time, device)
    convicted: set[str] = field(default_factory=set)


class CircuitBreakers:
    """The breakers of all models."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def reason(self, model: str) -> str | None:
        """Return why the model may not be loaded, None if closed or half-open."""
        breaker = self._breakers.get(model)
        if breaker is None or breaker.state is not _State.OPEN or not breaker.is_blocking:
            return None
        return breaker.reason

    def is_shut_out(self, model: str) -> bool:
        """Return whether new workers skip the model: the breaker is open or half-open."""
        breaker = self._breakers.get(model)
        return breaker is not None and breaker.is_blocking and breaker.state is not _State.CLOSED

    def retry_at_s(self, model: str) -> float | None:
        """Return the time of the next try, None if the model is served."""
        breaker = self._breakers.get(model)
        is_closed = breaker is None or breaker.state is _State.CLOSED
        return None if breaker is None or is_closed else breaker.retry_at_s

    def record_crash(self, model: str, device: int, death: Death, now_s: float) -> str | None:
        """Record a crash attributed to the model; return the reason if the breaker opens."""
        breaker = self._of(model, now_s)
        recent = [one for one in breaker.crashes if now_s - one[0] < WINDOW_S]
        breaker.crashes = [*recent, (now_s, device)]
        if breaker.state is _State.OPEN:
            return None
        if breaker.wait_s:
            where = f"worker of device {device} again"
        elif len(breaker.crashes) >= MAX_CRASHES:
            where = _where([device for _, device in breaker.crashes])
        else:
            return None
        doing = f", in {death.doing}" if death.doing else ""
        return self.open(model, f"ended the {where}: {death.reason}{doing}", now_s)

    def record_convicted(self, model: str, request_id: str, now_s: float) -> str | None:
        """Record a request of the model that crashed a worker alone, as :meth:`record_crash`."""
        breaker = self._of(model, now_s)
        breaker.convicted.add(request_id)
        if breaker.state is not _State.CLOSED or len(breaker.convicted) < MAX_CONVICTED:
            return None
        text = f"ended workers with {len(breaker.convicted)} requests in a row, each retried alone"
        return self.open(model, text, now_s)

    def answered(self, model: str) -> None:
        """Record that a request of the model succeeded: earlier crashes were due to requests."""
        breaker = self._breakers.get(model)
        if breaker is not None:
            breaker.convicted.clear()

    def open(self, model: str, reason: str, now_s: float, *, is_blocking: bool = True) -> str:
        """Open the breaker for a time that grows with each call; return the reason.

        If not ``is_blocking``, new workers may load the model nevertheless.
        """
        breaker = self._of(model, now_s)
        breaker.wait_s = min(max(FIRST_WAIT_S, 2 * breaker.wait_s), MAX_WAIT_S)
        breaker.state, breaker.reason, breaker.is_blocking = _State.OPEN, reason, is_blocking
        breaker.retry_at_s = now_s + breaker.wait_s
        breaker.crashes, breaker.convicted = [], set()
        return reason

    def postpone(self, model: str, now_s: float) -> None:
        """Delay the next try because the latest try was inconclusive; no effect otherwise."""
        breaker = self._breakers.get(model)
        if breaker is not None and breaker.state is _State.HALF_OPEN:
            breaker.state, breaker.retry_at_s = _State.OPEN, now_s + FIRST_WAIT_S

    def due(self, now_s: float) -> list[str]:
        """Return the models whose wait is over."""
        return [
            model
            for model, breaker in self._breakers.items()
            if breaker.state is _State.OPEN and now_s >= breaker.retry_at_s
        ]

    def half_open(self, model: str) -> None:
        """Let the model be loaded as a trial."""
        self._breakers[model].state = _State.HALF_OPEN

    def is_half_open(self, model: str) -> bool:
        """Return whether the model is being loaded as a trial."""
        breaker = self._breakers.get(model)
        return breaker is not None and breaker.state is _State.HALF_OPEN

    def close(self, model: str, now_s: float) -> bool:
        """Record a successful load; return whether the breaker closes."""
        breaker = self._breakers.get(model)
        if breaker is None or breaker.state is _State.CLOSED:
            return False
        if breaker.state is _State.OPEN and breaker.is_blocking:
            return False  # the load began before the breaker opened
        breaker.state, breaker.closed_at_s = _State.CLOSED, now_s
        return True

    def reset(self, model: str) -> None:
        """Forget the model's record, after a user's request or the removal of the model."""
        self._breakers.pop(model, None)

    def _of(self, model: str, now_s: float) -> _Breaker:
        """Return the model's breaker.

        The wait starts again from the minimum after a time without a crash as long as the last
        wait, and at least the window.
        """
        breaker = self._breakers.setdefault(model, _Breaker())
        quiet_s = max(WINDOW_S, breaker.wait_s)
        if breaker.state is _State.CLOSED and now_s - breaker.closed_at_s > quiet_s:
            breaker.wait_s = 0.0
        return breaker


def _where(devices: list[int]) -> str:
    distinct = sorted(set(devices))
    if len(distinct) == 1:
        return f"worker of device {distinct[0]} twice"
    return f"workers of devices {' and '.join(map(str, distinct))}"
