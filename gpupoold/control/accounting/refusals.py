"""Events of refused requests."""

from __future__ import annotations

from collections.abc import Iterable

from gpupool_state import History

_EVENT_EVERY_S = 60.0


class RefusalEvents:
    """Events of refused requests, one per model and minute."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, tuple[int, str]] = {}

    def note(self, model: str, reason: str, now_s: float, num_requests: int = 1) -> None:
        num, _ = self._untold.get(model, (0, ""))
        self._untold[model] = num + num_requests, reason
        self._tell((model,), now_s)

    def tell(self, now_s: float) -> None:
        """Record held-back events after the end of the minute."""
        self._tell(tuple(self._untold), now_s)

    def _tell(self, models: Iterable[str], now_s: float) -> None:
        for model in models:
            told_s = self._told_s.get(model)
            if told_s is not None and now_s - told_s < _EVENT_EVERY_S:
                continue
            num, reason = self._untold.pop(model)
            self._told_s[model] = now_s
            requests = "1 request was refused" if num == 1 else f"{num} requests were refused"
            self._history.record_event("warning", "refused", model, f"{requests}: {reason}")
