"""Counts of minutes as the admin API shows them: alone, or added up over longer spans."""

from __future__ import annotations

from collections.abc import Iterable

from gpupool_state import MinuteRow
from gpupoold.api.schemas_explain import LatenessInfo, SpanInfo
from gpupoold.control.accounting.minutes import MINUTE_S, counts_of
from gpupoold.control.accounting.model_stats import Counts

# Of a window of time no more than so many spans are shown.
_MAX_SPANS = 60
_SPANS_S = tuple(MINUTE_S * minutes for minutes in (1, 5, 15, 60, 360, 1440))


def span_s(window_s: float) -> int:
    """The shortest usual span of which a window has not too many."""
    return next((one for one in _SPANS_S if window_s <= one * _MAX_SPANS), _SPANS_S[-1])


def span_info(at: float, length_s: float, counts: Counts) -> SpanInfo:
    """Counts of a span that began ``at``."""
    return SpanInfo(
        at=at,
        span_s=length_s,
        requests=counts.requests,
        completed=counts.completed,
        aborted=counts.aborted,
        failed=counts.failed,
        refused=counts.refused,
        dropped=counts.dropped,
        tokens=counts.tokens,
        tokens_in_time=counts.tokens_in_time,
        attainment=counts.attainment,
        **counts.percentiles()._asdict(),
        lateness=lateness(counts),
    )


def lateness(counts: Counts) -> LatenessInfo:
    return LatenessInfo(
        loading_s=counts.late_by_loading_s,
        queueing_s=counts.late_by_queueing_s,
        switching_s=counts.late_by_switching_s,
        computing_s=counts.late_by_computing_s,
    )


class Spans:
    """Minutes added up over spans of one length that begin at its multiples."""

    def __init__(self, length_s: int) -> None:
        self._length_s = length_s
        self._counts: dict[int, Counts] = {}

    def add(self, rows: Iterable[MinuteRow]) -> None:
        """Count these minutes too.

        Raises:
            ValueError: a row does not hold what it should.
        """
        for row in rows:
            at = row.minute_at // self._length_s * self._length_s
            self._counts.setdefault(at, Counts()).merge(counts_of(row))

    def infos(self) -> list[SpanInfo]:
        """Those in which something happened, oldest first."""
        return [span_info(at, self._length_s, self._counts[at]) for at in sorted(self._counts)]
