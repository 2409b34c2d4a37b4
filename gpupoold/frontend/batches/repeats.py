"""When the refused requests of a batch are asked again, and how often. Pure.

A refusal of the moment (429, 503) holds back all requests to the same model, because the refusal
mostly concerns the model. Other failures of the server are repeated a few times. All other answers
are results.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_REFUSALS = 100
GIVE_UP_S = 6 * 3600.0
MAX_FAILURES = 3
_OF_THE_MOMENT = frozenset({429, 503})
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 300.0


@dataclass(slots=True)
class _Tries:
    """Tries of a request without a result."""

    model: str
    since_s: float
    num_refusals: int = 0
    num_failures: int = 0
    due_s: float = 0.0


@dataclass(slots=True)
class _HeldModel:
    """A model whose latest request was refused."""

    since_s: float
    due_s: float
    reason: str


class Repeats:
    """The requests of one batch that wait for another try; times are seconds of one clock."""

    def __init__(self) -> None:
        self._lines: dict[int, _Tries] = {}
        self._held: dict[str, _HeldModel] = {}

    @property
    def reason(self) -> str:
        """Why requests wait; empty if none has been refused."""
        return next((one.reason for one in self._held.values()), "")

    def due_s(self, now_s: float) -> float:
        """Return the time of the next try, now if none is known."""
        dues = [one.due_s for one in self._held.values()]
        for one in self._lines.values():
            held = self._held.get(one.model)
            dues.append(one.due_s if held is None else max(one.due_s, held.due_s))
        return min((due_s for due_s in dues if due_s > now_s), default=now_s)

    def may_ask(self, number: int, model: str, now_s: float) -> bool:
        """Return whether the request in line ``number`` may be asked now."""
        line, held = self._lines.get(number), self._held.get(model)
        return (line is None or line.due_s <= now_s) and (held is None or held.due_s <= now_s)

    def is_result(
        self,
        number: int,
        model: str,
        status: int,
        now_s: float,
        retry_after_s: float = 0.0,
        reason: str = "",
    ) -> bool:
        """Note an answer; return False if the request has to be asked again.

        The latest refusal is the result after ``MAX_REFUSALS``, or when the request or the model
        has been refused for ``GIVE_UP_S``; the latest failure is the result after ``MAX_FAILURES``.
        """
        line = self._lines.pop(number, None) or _Tries(model, now_s)
        if status in _OF_THE_MOMENT:
            line.num_refusals += 1
            line.due_s = now_s + _pause_s(line.num_refusals, retry_after_s)
            held = self._held.get(model)
            since_s = now_s if held is None else held.since_s
            self._held[model] = _HeldModel(since_s, line.due_s, reason or f"HTTP status {status}")
            late_s = now_s - min(since_s, line.since_s)
            is_last = line.num_refusals >= MAX_REFUSALS or late_s >= GIVE_UP_S
        elif status >= 500:
            line.num_failures += 1
            line.due_s = now_s + _pause_s(line.num_failures)
            is_last = line.num_failures >= MAX_FAILURES
        else:
            self._held.pop(model, None)
            return True
        if not is_last:
            self._lines[number] = line
        return is_last


def _pause_s(num_tries: int, retry_after_s: float = 0.0) -> float:
    """Return the pause after a try: ``Retry-After``, or longer with each try, within a bound."""
    growing_s: float = _FIRST_PAUSE_S * 2 ** min(num_tries - 1, 20)
    return min(max(growing_s, retry_after_s), _MAX_PAUSE_S)
