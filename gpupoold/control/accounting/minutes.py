"""Counts by minute and model: closed on time, stored in the history, restored after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gpupool_state import History, MinuteRow
from gpupoold.control.accounting.model_stats import NUM_MINUTES, Counts, ModelStats
from gpupoold.domain import COUNT_NAMES
from gpupoold.errors import Failed
from gpupoold.stats.histogram import Histogram

_logger = logging.getLogger(__name__)
MINUTE_S = 60


class Minutes:
    """Closes all models' minutes when the clock's minute ends. ``now``: wall-clock seconds."""

    def __init__(
        self, history: History, stats: dict[str, ModelStats], now: Callable[[], float] = time.time
    ) -> None:
        self._history = history
        self._stats = stats
        self._now = now
        self._minute = self._minute_now()

    async def restore(self) -> None:
        """Restore the last hour's minutes from the previous daemon."""
        try:
            since = (self._minute - NUM_MINUTES + 2) * MINUTE_S - 1
            rows = [row async for part in self._history.minutes(since) for row in part]
            known = minutes_of(rows)
        except (Failed, ValueError) as error:
            _logger.warning("the last hour's minutes cannot be read: %s", error)
            return
        for model, minutes in known.items():
            numbers = range(self._minute - NUM_MINUTES + 1, self._minute)
            found = [minutes.get(number * MINUTE_S) for number in numbers]
            self._stats.setdefault(model, ModelStats()).remember(found)

    def tick(self, now_s: float) -> None:
        """Record the end of a second; ``now_s`` is monotonic. To be called every second."""
        for stats in self._stats.values():
            stats.second_over(now_s)
        minute = self._minute_now()
        if minute != self._minute:
            # After a step back of the clock, repeated minutes get a second row.
            self._end(max(1, minute - self._minute))
            self._minute = minute

    def under_way(self, model: str | None = None) -> list[MinuteRow]:
        """Return rows for the present minute, of one model or of all."""
        stats = self._stats if model is None else {model: self._stats.get(model, ModelStats())}
        return [
            _row(self._minute * MINUTE_S, name, one.now)
            for name, one in stats.items()
            if not one.now.is_empty
        ]

    def close(self) -> None:
        """Store the present, incomplete minute."""
        self._end(1)

    def _end(self, num_minutes: int) -> None:
        for model, stats in self._stats.items():
            over = stats.minute_over(num_minutes)
            if not over.is_empty:
                self._history.record_minute(_row(self._minute * MINUTE_S, model, over))

    def _minute_now(self) -> int:
        return int(self._now() // MINUTE_S)


def minutes_of(rows: list[MinuteRow]) -> dict[str, dict[int, Counts]]:
    """Return rows of the history by model and start of the minute.

    Raises:
        ValueError: a row is malformed.
    """
    found: dict[str, dict[int, Counts]] = {}
    for row in rows:
        found.setdefault(row.model, {}).setdefault(row.minute_at, Counts()).merge(counts_of(row))
    return found


def _row(minute_at: int, model: str, counts: Counts) -> MinuteRow:
    return MinuteRow(
        minute_at=minute_at,
        model=model,
        lateness=counts.lateness,
        first_token=counts.first_token,
        between_tokens=counts.between_tokens,
        ttft=counts.ttft.text(),
        tbt=counts.tbt.text(),
        **counts.counts(),
    )


def counts_of(row: MinuteRow) -> Counts:
    """Return the counts in a row of the history.

    Raises:
        ValueError: the row is malformed.
    """
    return Counts(
        lateness=row.lateness,
        first_token=row.first_token,
        between_tokens=row.between_tokens,
        ttft=Histogram.parse(row.ttft),
        tbt=Histogram.parse(row.tbt),
        **{name: getattr(row, name) for name in COUNT_NAMES},
    )
