"""Models that crash workers or cannot be loaded are not served for a while. Pure.

A circuit breaker for each model: *open* after crashes that are due to the model, or when no worker
could load it; *half-open* when its wait is over and it is loaded again; *closed* if that works. A
crash soon afterwards opens it again, with twice the wait. Instants are seconds of any one
monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gpupoold.control.processes.crash_attribution import Death

MAX_CRASHES = 2
WINDOW_S = 600.0
MAX_CONVICTED = 3
"""So many of its requests in a row crash a worker, each alone, before it is the model's fault."""
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
    wait_s: float = 0.0  # the last one; 0: none yet, or long ago
    retry_at_s: float = 0.0
    closed_at_s: float = 0.0
    crashes: list[tuple[float, int]] = field(default_factory=list)  # when, on which device
    convicted: set[str] = field(default_factory=set)


class CircuitBreakers:
    """Of all models."""

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def reason(self, model: str) -> str | None:
        """Why the model may not be loaded; None if it may, which is so too while it is tried."""
        breaker = self._breakers.get(model)
        if breaker is None or breaker.state is not _State.OPEN or not breaker.is_blocking:
            return None
        return breaker.reason

    def is_shut_out(self, model: str) -> bool:
        """Return whether workers that come up do not load the model: it may not be, or is tried."""
        breaker = self._breakers.get(model)
        return breaker is not None and breaker.is_blocking and breaker.state is not _State.CLOSED

    def retry_at_s(self, model: str) -> float | None:
        """When the model is tried again; None if it is served."""
        breaker = self._breakers.get(model)
        is_closed = breaker is None or breaker.state is _State.CLOSED
        return None if breaker is None or is_closed else breaker.retry_at_s

    def record_crash(self, model: str, device: int, death: Death, now_s: float) -> str | None:
        """Note a crash that is due to the model; the reason, if that opens its breaker."""
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
        """Note a request of the model that crashed a worker alone; see :meth:`record_crash`."""
        breaker = self._of(model, now_s)
        breaker.convicted.add(request_id)
        if breaker.state is not _State.CLOSED or len(breaker.convicted) < MAX_CONVICTED:
            return None
        text = f"ended workers with each of {len(breaker.convicted)} requests in a row, all alone"
        return self.open(model, text, now_s)

    def answered(self, model: str) -> None:
        """Note that a request of the model has got past where others crashed, or has ended well:
        those crashed by themselves."""
        breaker = self._breakers.get(model)
        if breaker is not None:
            breaker.convicted.clear()

    def open(self, model: str, reason: str, now_s: float, *, is_blocking: bool = True) -> str:
        """Shut the model out for a while, longer each time; returns the reason.

        Not ``is_blocking``: workers that come up may load it nevertheless.
        """
        breaker = self._of(model, now_s)
        breaker.wait_s = min(max(FIRST_WAIT_S, 2 * breaker.wait_s), MAX_WAIT_S)
        breaker.state, breaker.reason, breaker.is_blocking = _State.OPEN, reason, is_blocking
        breaker.retry_at_s = now_s + breaker.wait_s
        breaker.crashes, breaker.convicted = [], set()
        return reason

    def postpone(self, model: str, now_s: float) -> None:
        """Try the model again later: this time nothing was learnt. Does nothing if it was."""
        breaker = self._breakers.get(model)
        if breaker is not None and breaker.state is _State.HALF_OPEN:
            breaker.state, breaker.retry_at_s = _State.OPEN, now_s + FIRST_WAIT_S

    def due(self, now_s: float) -> list[str]:
        """The models whose wait is over."""
        return [
            model
            for model, breaker in self._breakers.items()
            if breaker.state is _State.OPEN and now_s >= breaker.retry_at_s
        ]

    def half_open(self, model: str) -> None:
        """Let the model be loaded, to see whether it works."""
        self._breakers[model].state = _State.HALF_OPEN

    def close(self, model: str, now_s: float) -> bool:
        """Note that the model has been loaded and works; whether that closes its breaker."""
        breaker = self._breakers.get(model)
        if breaker is None or breaker.state is _State.CLOSED:
            return False
        if breaker.state is _State.OPEN and breaker.is_blocking:
            return False  # a load that was under way when it was opened
        breaker.state, breaker.closed_at_s = _State.CLOSED, now_s
        return True

    def reset(self, model: str) -> None:
        """Forget all that is known: somebody asks for the model, or it is removed."""
        self._breakers.pop(model, None)

    def _of(self, model: str, now_s: float) -> _Breaker:
        """The model's breaker; its waits begin anew after as long a time without a crash as the
        last one, and at least the window."""
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
