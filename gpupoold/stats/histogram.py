"""Histograms of durations in bounded memory. Pure, standard library only.

Bounds differ by a fixed factor (as in HdrHistogram and DDSketch), so a percentile is within half
that factor of the exact value: ``10**(1/64)``, 3.7 %. The bounds exported to Prometheus are a
subset, so exported counts are exact and no value is counted twice.
"""

from __future__ import annotations

import functools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import Self

from gpupoold.stats.buckets import LATENCY_BOUNDS_S

_PER_DECADE = 32
_LEAST_DECADE, _MOST_DECADE = -4, 4

# Bucket i has what is above bound i-1 and not above bound i: 0.1 ms to 10,000 s.
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
    """Counts of durations by bucket; ``sum_s`` is the exact sum in seconds."""

    __slots__ = ("_counts", "sum_s")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.sum_s = 0.0

    def __len__(self) -> int:
        return sum(self._counts.values())

    def plus(self, other: Histogram) -> Histogram:
        """Return a new histogram with the counts of both."""
        made = Histogram()
        made._counts, made.sum_s = self._counts.copy(), self.sum_s + other.sum_s
        counts = made._counts
        for bucket, num in other._counts.items():
            counts[bucket] = counts.get(bucket, 0) + num
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._counts == other._counts

    def add(self, duration_s: float, num: int = 1) -> None:
        """Count a duration, ``num`` times."""
        counts, bucket = self._counts, bisect_left(BOUNDS_S, duration_s)
        counts[bucket] = counts.get(bucket, 0) + num
        self.sum_s += duration_s * num

    def merge(self, other: Histogram, sign: int = 1) -> None:
        """Add ``other``'s counts, or subtract them if ``sign`` is -1; they must have been added
        before.
        """
        counts = self._counts
        for bucket, num in other._counts.items():
            left = counts.get(bucket, 0) + sign * num
            assert left >= 0
            if left:
                counts[bucket] = left
            else:
                counts.pop(bucket, None)
        self.sum_s = self.sum_s + sign * other.sum_s if counts else 0.0

    def counts_by(self, bounds_s: Sequence[float]) -> list[int]:
        """Return the counts between consecutive ``bounds_s``, a subset of ``BOUNDS_S``.

        The last entry counts the durations above all bounds.
        """
        counts = [0] * (len(bounds_s) + 1)
        for bucket, num in self._counts.items():
            counts[bisect_left(bounds_s, _upper_s(bucket))] += num
        return counts

    def percentile(self, fraction: float) -> float | None:
        """Return a nearest-rank percentile (``fraction`` 0.99 for p99) in seconds, None if
        empty.

        A value below the lowest bound counts as 0.
        """
        return self._value_at(sorted(self._counts), len(self), fraction)

    def p50_and_p99(self) -> tuple[float | None, float | None]:
        """Return both percentiles, cheaper than two calls."""
        buckets, num = sorted(self._counts), len(self)
        return self._value_at(buckets, num, 0.5), self._value_at(buckets, num, 0.99)

    def _value_at(self, buckets: list[int], num_all: int, fraction: float) -> float | None:
        counts, (numerator, denominator) = self._counts, _exact(fraction)
        rank = max(1, -(-num_all * numerator // denominator))
        if 2 * rank > num_all:  # it is nearer to the longest
            left = num_all - rank
            for bucket in reversed(buckets):
                num = counts[bucket]
                if left < num:
                    return _inside_s(bucket, (num - left - 0.5) / num)
                left -= num
            return None
        for bucket in buckets:
            num = counts[bucket]
            if rank <= num:
                return _inside_s(bucket, (rank - 0.5) / num)
            rank -= num
        return None

    def text(self) -> str:
        """Return JSON: the sum, then pairs of bucket number and count."""
        return json.dumps([self.sum_s, *map(list, sorted(self._counts.items()))])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of ``text()``.

        Raises:
            ValueError: the text has another form.
        """
        made = cls()
        try:
            sum_s, *pairs = json.loads(text)
            made._counts = {int(bucket): int(num) for bucket, num in pairs}
            made.sum_s = float(sum_s)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a histogram: {text[:80]!r}") from error
        return made


@functools.cache
def _exact(fraction: float) -> tuple[int, int]:
    """Return numerator and denominator of the number's decimal notation.

    In floating point 0.07 * 100 is above 7.
    """
    return Fraction(str(fraction)).as_integer_ratio()


def _upper_s(bucket: int) -> float:
    return BOUNDS_S[bucket] if bucket < len(BOUNDS_S) else math.inf


def _inside_s(bucket: int, share: float) -> float:
    """Return the duration below which ``share`` of a bucket lies, assuming an even spread."""
    if bucket == 0:
        return 0.0
    if bucket == len(BOUNDS_S):
        return BOUNDS_S[-1]
    lower_s, upper_s = BOUNDS_S[bucket - 1 : bucket + 1]
    return lower_s * math.pow(upper_s / lower_s, share)
