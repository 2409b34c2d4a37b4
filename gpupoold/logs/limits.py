"""Bounds on the records of one line of code, for any input. Standard library only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
MAX_TRACEBACKS = 5
MAX_RECORDS = 300
MAX_TEXT_CHARS = 16_384


@dataclass(slots=True)
class _Place:
    """Counts of one line of code in the present window; ``began_at`` in seconds of the clock."""

    began_at: float
    num_tracebacks: int = 0
    num_records: int = 0
    num_dropped: int = 0


class LogLimit(logging.Filter):
    """A filter that drops records of a line of code (a *place*) that has logged too many.

    Per minute and place, ``MAX_TRACEBACKS`` records with a traceback and ``MAX_RECORDS`` other
    records pass; the next record to pass states the number of dropped records. Debug records are
    not counted. A message or traceback above ``MAX_TEXT_CHARS`` characters loses its middle. All
    handlers of a process share one filter, which counts a record once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be logged."""
        verdict = getattr(record, "gpupool_passes", None)
        if verdict is None:
            verdict = self._passes(record)
            record.gpupool_passes = verdict
            if verdict:
                _shorten(record)
        return bool(verdict)

    def _passes(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        now_s = self._clock()
        key = (record.name, record.lineno)
        with self._lock:
            place = self._places.get(key)
            num_dropped = 0
            if place is None or now_s - place.began_at >= WINDOW_S:
                num_dropped = place.num_dropped if place is not None else 0
                place = self._places[key] = _Place(now_s)
            if record.exc_info:
                place.num_tracebacks += 1
                passes = place.num_tracebacks <= MAX_TRACEBACKS
            else:
                place.num_records += 1
                passes = place.num_records <= MAX_RECORDS
            place.num_dropped += not passes
        if num_dropped:
            _append(record, f" ({num_dropped} more from here were not logged)")
        return passes


def _shorten(record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
        if len(text) > MAX_TEXT_CHARS:
            record.msg, record.args = _without_middle(text), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = _without_middle(logging.Formatter().formatException(record.exc_info))
    except Exception:  # as in handlers, a bad record must not raise
        record.msg, record.args = f"a record of {record.name} that cannot be formatted", ()


def _append(record: logging.LogRecord, text: str) -> None:
    record.msg = f"{record.msg}{text.replace('%', '%%') if record.args else text}"


def _without_middle(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
