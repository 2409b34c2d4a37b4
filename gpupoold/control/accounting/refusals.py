"""Events of refused requests."""

from __future__ import annotations

from collections.abc import Iterable

from gpupool_state import History

_EVENT_EVERY_S = 60.0


class RefusalEvents:
    """Events of refused requests, one per model and minute."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._reported_s: dict[str, float] = {}
        self._unreported: dict[str, tuple[int, str]] = {}

    def note(self, model: str, reason: str, now_s: float, num_requests: int = 1) -> None:
        num, _ = self._unreported.get(model, (0, ""))
        self._unreported[model] = num + num_requests, reason
        self._record((model,), now_s)

    def report(self, now_s: float) -> None:
        """Record held-back events after the end of the minute."""
        self._record(tuple(self._unreported), now_s)

    def _record(self, models: Iterable[str], now_s: float) -> None:
        for model in models:
            reported_s = self._reported_s.get(model)
            if reported_s is not None and now_s - reported_s < _EVENT_EVERY_S:
                continue
            num, reason = self._unreported.pop(model)
            self._reported_s[model] = now_s
            requests = "1 request was refused" if num == 1 else f"{num} requests were refused"
            self._history.record_event("warning", "refused", model, f"{requests}: {reason}")
