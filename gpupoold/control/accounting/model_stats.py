"""Counts of each model's requests: since the start, of the last hour, and by minute."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter, itemgetter
from typing import Self

from gpupool_state import History, MinuteRow
from gpupoold.control.live_requests import LiveRequest
from gpupoold.domain import COUNT_NAMES, SWITCH_STAGES, FinishReason, Percentiles, Switch
from gpupoold.durations import TimedCounts
from gpupoold.errors import Failed
from gpupoold.stats.histogram import Histogram
from gpupoold.wire.messages import DraftCounts

NUM_MINUTES = 60
_NUM_SECONDS = 60
_RATE_SECONDS = 10
# Share of new tokens after which the percentiles of the hour are computed again.
_MISSING_SHARE = 0.01

_logger = logging.getLogger(__name__)
MINUTE_S = 60


@dataclass(slots=True)
class Counts(TimedCounts):
    """Counts with lateness and latencies, which can be added.

    ``first_token`` divides the sum of ``ttft`` by stage, ``between_tokens`` the sum of ``tbt``.
    """

    ttft: Histogram = field(default_factory=Histogram)
    tbt: Histogram = field(default_factory=Histogram)

    def merge(self, other: Self, sign: int = 1) -> None:
        """Add ``other``'s counts, or subtract them if ``sign`` is -1."""
        for name in COUNT_NAMES:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        self._add_durations(self, other, sign)
        self.ttft.merge(other.ttft, sign)
        self.tbt.merge(other.tbt, sign)

    def numbers_with(self, other: Self) -> Self:
        """Return the sums of both counts, without latencies."""
        total = type(self)(*map(add, _counts_of(self), _counts_of(other)))
        total._add_durations(self, other)
        return total

    def _add_durations(self, one: Self, other: Self, sign: int = 1) -> None:
        self.lateness = one.lateness.plus(other.lateness, sign)
        self.first_token = one.first_token.plus(other.first_token, sign)
        self.between_tokens = one.between_tokens.plus(other.between_tokens, sign)

    def counts(self) -> dict[str, int]:
        """Return the counts of requests and tokens by name."""
        return dict(zip(COUNT_NAMES, _counts_of(self), strict=True))

    def percentiles(self) -> Percentiles:
        return Percentiles(*self.ttft.p50_and_p99(), *self.tbt.p50_and_p99())

    @property
    def attainment(self) -> float | None:
        """Share of tokens that met their deadline, None without tokens."""
        return self.tokens_in_time / self.tokens if self.tokens else None

    @property
    def is_empty(self) -> bool:
        return not any(_counts_of(self)) and not self.lateness.total_s


_counts_of = attrgetter(*COUNT_NAMES)


class ModelStats:
    """One model's counts since the daemon started, by the minute for the last hour.

    ``now`` has the counts of the present minute, to which all counts are added.
    """

    def __init__(self) -> None:
        self.now = Counts()
        self.drafts = DraftCounts()  # of speculative decoding, since the start
        self.paced = Histogram()  # gaps of paced streams as released, since the start
        self.background_tokens = 0  # of batches, since the start; in no other count
        self._closed = Counts()  # of all closed minutes since the start
        self._hour = Counts()  # of the minutes in _minutes
        self._minutes: deque[Counts | None] = deque([None] * (NUM_MINUTES - 1))
        # The attainments of _minutes, cached after the first use.
        self._attainments: list[float | None] | None = None
        # Percentiles of the last hour, and the number of tokens up to which the values are valid.
        self._percentiles = Percentiles()
        self._percentiles_hold_to = 0.0
        # (monotonic seconds, tokens, tokens in time) since the start, one item per second.
        self._seconds: deque[tuple[float, int, int]] = deque(maxlen=_NUM_SECONDS + 1)

    def add_tokens(
        self,
        request: LiveRequest,
        token_ids: Sequence[int],
        at_s: float,
        *,
        has_result: bool = False,
    ) -> float:
        """Count tokens of ``request`` sent at ``at_s``, and add the tokens to the request.

        A pooling result counts as a token. Returns the seconds of lateness that the answer gained.
        """
        num_tokens = len(token_ids) + has_result
        if not num_tokens:
            return 0.0
        now, times_s, num_in_time = self.now, request.token_times_s, request.num_in_time
        if times_s:
            now.tbt.add(at_s - times_s[-1])
        else:
            now.ttft.add(at_s - request.arrival_s)
            now.first_tokens += 1
        if num_tokens > 1:
            now.tbt.add_many(0.0, num_tokens - 1)
        late_s = request.late_s
        request.add_tokens(token_ids, at_s, has_result=has_result)
        now.tokens += num_tokens
        now.tokens_in_time += request.num_in_time - num_in_time
        return request.late_s - late_s if request.late_s > late_s else 0.0

    def end(self, reason: FinishReason) -> None:
        """Count the end of a request."""
        now = self.now
        if reason is FinishReason.ERROR:
            now.failed += 1
        elif reason is FinishReason.ABORT:
            now.aborted += 1
        else:
            now.completed += 1

    def second_over(self, now_s: float) -> None:
        """Record the number of tokens at ``now_s``; to be called every second."""
        self._seconds.append((now_s, *self._tokens()))

    def minute_over(self, num_minutes: int = 1) -> Counts:
        """Return the counts of the present minute, and begin the next minute.

        ``num_minutes`` is greater than 1 if the daemon was asleep for some minutes.
        """
        over, self.now = self.now, Counts()
        self._closed.merge(over)
        self.remember([None if over.is_empty else over])
        self.remember([None] * (min(num_minutes, NUM_MINUTES) - 1))
        return over

    def remember(self, minutes: Sequence[Counts | None]) -> None:
        """Append past minutes, oldest first; None stands for an empty minute."""
        self._attainments, self._percentiles_hold_to = None, 0.0
        for minute in minutes:
            gone = self._minutes.popleft()
            if gone is not None:
                self._hour.merge(gone, -1)
            self._minutes.append(minute)
            if minute is not None:
                self._hour.merge(minute)

    def so_far(self) -> Counts:
        """Return the counts since the daemon's start, without latencies."""
        return self._closed.numbers_with(self.now)

    def so_far_with_latencies(self) -> Counts:
        """Return :meth:`so_far` with histograms of latencies, at a higher cost."""
        total = Counts()
        total.merge(self._closed)
        total.merge(self.now)
        return total

    def last_hour(self) -> Counts:
        """Return the counts of the last hour and the present minute."""
        hour, now = self._hour, self.now
        total = hour.numbers_with(now)
        total.ttft, total.tbt = hour.ttft.plus(now.ttft), hour.tbt.plus(now.tbt)
        return total

    def hour_percentiles(self) -> Percentiles:
        """Return percentiles of the last hour; the latest hundredth of tokens may be missing."""
        num_tokens = self._hour.tokens + self.now.tokens
        if num_tokens > self._percentiles_hold_to:
            self._percentiles = self.last_hour().percentiles()
            self._percentiles_hold_to = num_tokens * (1 + _MISSING_SHARE)
        return self._percentiles

    def hour_attainment(self) -> float | None:
        """Return the share of the last hour's tokens that were in time, None without tokens."""
        hour, now = self._hour, self.now
        num_tokens = hour.tokens + now.tokens
        return (hour.tokens_in_time + now.tokens_in_time) / num_tokens if num_tokens else None

    def attainment_1m(self, now_s: float) -> float | None:
        """Return the share of the last minute's tokens that were in time, None without tokens."""
        _, tokens, in_time = self._since(now_s - _NUM_SECONDS)
        all_tokens, all_in_time = self._tokens()
        return (all_in_time - in_time) / (all_tokens - tokens) if all_tokens > tokens else None

    def attainment_minutes(self) -> list[float | None]:
        """Return the attainment of each minute of the last hour, the present minute last.

        Values have four digits, because sixty values for each of a hundred models are most of the
        data for ``gpupool top``.
        """
        if self._attainments is None:
            self._attainments = [*map(_short, self._minutes)]
        return [*self._attainments, _short(self.now)]

    def tokens_per_s(self, now_s: float) -> float:
        """Return the mean over the last seconds, or since the start if later."""
        at_s, tokens, _ = self._since(now_s - _RATE_SECONDS)
        return (self._tokens()[0] - tokens) / max(now_s - at_s, 1.0)

    def _tokens(self) -> tuple[int, int]:
        closed, now = self._closed, self.now
        return closed.tokens + now.tokens, closed.tokens_in_time + now.tokens_in_time

    def _since(self, since_s: float) -> tuple[float, int, int]:
        """Return the newest recorded second up to ``since_s``, or zeros."""
        num_before = bisect_right(self._seconds, since_s, key=itemgetter(0))
        if num_before:
            return self._seconds[num_before - 1]
        return self._seconds[0][0] - 1.0 if self._seconds else math.inf, 0, 0


def _short(counts: Counts | None) -> float | None:
    attainment = None if counts is None else counts.attainment
    return None if attainment is None else round(attainment, 4)


@dataclass(slots=True)
class SwitchStats:
    """Totals over all switches since the daemon started."""

    count: int = 0
    moved_bytes: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("total", *SWITCH_STAGES), 0.0)
    )

    def add(self, switch: Switch) -> None:
        self.count += 1
        self.moved_bytes += switch.moved_bytes
        for stage in self.seconds:
            self.seconds[stage] += getattr(switch, f"{stage}_s")


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
            _row(self._minute * MINUTE_S, name, model.now)
            for name, model in stats.items()
            if not model.now.is_empty
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

    Raises ValueError: a row is malformed.
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
    """Return the counts in a row of the history; raise ValueError for a malformed row."""
    return Counts(
        lateness=row.lateness,
        first_token=row.first_token,
        between_tokens=row.between_tokens,
        ttft=Histogram.parse(row.ttft),
        tbt=Histogram.parse(row.tbt),
        **{name: getattr(row, name) for name in COUNT_NAMES},
    )
