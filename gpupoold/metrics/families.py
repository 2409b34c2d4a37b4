"""Metric families as plain data, and the conversion to the Prometheus client's objects.

Gathering is quick; the conversion takes ten times as long and can run in another thread. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gpupoold.stats.histogram import LATENCY_BOUNDS_S, Histogram

T = TypeVar("T")
# The values of a sample's labels, and the sample's value; None leaves the sample out.
Row = tuple[Sequence[str], float | None]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A gauge, or a counter, whose ``name`` lacks ``_total``."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    labels: Sequence[str]
    rows: list[Row]
    prefix: str = "gpupool_"

    def metric(self) -> Metric:
        """The same for the Prometheus client."""
        family = self.kind(self.prefix + self.name, self.text, labels=self.labels)
        for values, value in self.rows:
            if value is not None:
                family.add_metric(values, value)
        return family


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms: bounds, counts and sums."""

    name: str
    text: str
    labels: Sequence[str]
    rows: list[tuple[Sequence[str], Sequence[float], list[int], float]]

    def metric(self) -> Metric:
        """The same for the Prometheus client."""
        family = HistogramMetricFamily(f"gpupool_{self.name}", self.text, labels=self.labels)
        for values, bounds, counts, total in self.rows:
            family.add_metric(values, _cumulative(bounds, counts), total)
        return family


Family = Numbers | Histograms


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Numbers:
    """Return a gauge."""
    return Numbers(GaugeMetricFamily, name, text, labels, list(rows))


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Family:
    """Return a counter; ``name`` lacks ``_total``."""
    return Numbers(CounterMetricFamily, name, text, labels, list(rows))


def one_each(
    make: Callable[[str, str, Sequence[str], Iterable[Row]], Family],
    label: str,
    items: Iterable[tuple[str, T]],
) -> Callable[[str, str, Callable[[T], float | None]], Family]:
    """Return a function that makes families of one sample per item; ``label`` has the item's key.

    The function takes a name, a text and the value of an item.
    """
    known = list(items)

    def family(name: str, text: str, value: Callable[[T], float | None]) -> Family:
        return make(name, text, (label,), (((key,), value(one)) for key, one in known))

    return family


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Histogram]],
    bounds_s: Sequence[float] = LATENCY_BOUNDS_S,
) -> Family:
    """Return a histogram of durations by ``bounds_s``, a subset of the histograms' bounds."""
    copies = [(values, bounds_s, one.counts_by(bounds_s), one.sum_s) for values, one in rows]
    return Histograms(name, text, labels, copies)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip((*bounds, math.inf), counts, strict=True):
        total += count
        found.append(("+Inf" if math.isinf(bound) else repr(bound), float(total)))
    return found
