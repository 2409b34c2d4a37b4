"""Counts of minutes for the admin API, single or summed over longer spans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpupool_state import MinuteRow
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo
from gpupoold.control.accounting.model_stats import MINUTE_S, Counts, counts_of

# Maximum number of spans in an answer.
_MAX_SPANS = 60
_SPANS_S = tuple(MINUTE_S * minutes for minutes in (1, 5, 15, 60, 360, 1440))


def span_s(window_s: float) -> int:
    """Return the shortest usual span that divides a window into at most ``_MAX_SPANS`` parts."""
    return next((one for one in _SPANS_S if window_s <= one * _MAX_SPANS), _SPANS_S[-1])


def span_info(at: float, length_s: float, counts: Counts) -> SpanInfo:
    """Return the body of a span that began ``at``."""
    return SpanInfo(**_values(at, length_s, counts))


def _values(at: float, length_s: float, counts: Counts) -> dict[str, Any]:
    return {
        "at": at,
        "span_s": length_s,
        "attainment": counts.attainment,
        "lateness": counts.lateness,
        "first_token": counts.first_token,
        "between_tokens": counts.between_tokens,
        **counts.counts(),
        **vars(counts.percentiles()),
    }


class Spans:
    """Sums of minutes over spans of one length, aligned to multiples of the length."""

    def __init__(self, length_s: int) -> None:
        self._length_s = length_s
        self._counts: dict[int, Counts] = {}

    def add(self, rows: Iterable[MinuteRow]) -> None:
        """Add minutes.

        Raises:
            ValueError: a row is malformed.
        """
        for row in rows:
            at = row.minute_at // self._length_s * self._length_s
            self._counts.setdefault(at, Counts()).merge(counts_of(row))

    def infos(self) -> list[SpanInfo]:
        """Return the spans with any count, oldest first."""
        return [span_info(at, self._length_s, self._counts[at]) for at in sorted(self._counts)]


class ModelSums:
    """Sums of each model's minutes over a span that began ``at``."""

    def __init__(self, at: float, length_s: float) -> None:
        self._at = at
        self._length_s = length_s
        self._counts: dict[str, Counts] = {}

    def add(self, rows: Iterable[MinuteRow]) -> None:
        """Add minutes.

        Raises:
            ValueError: a row is malformed.
        """
        for row in rows:
            self._counts.setdefault(row.model, Counts()).merge(counts_of(row))

    def infos(self) -> list[ModelSpan]:
        """Return the span of each model with any count, by name."""
        return [
            ModelSpan(model=name, **_values(self._at, self._length_s, self._counts[name]))
            for name in sorted(self._counts)
        ]
