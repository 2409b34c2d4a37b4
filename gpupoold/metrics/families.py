"""Families of the Prometheus client, each made in one expression. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from gpupoold.buckets import Buckets

# The values of a sample's labels, and its value; None: there is no such sample.
Row = tuple[Sequence[str], float | None]


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    """What goes up and down."""
    family = GaugeMetricFamily(f"gpupool_{name}", text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def counter(
    name: str, text: str, labels: Sequence[str], rows: Iterable[Row]
) -> CounterMetricFamily:
    """What only grows; ``name`` is without ``_total``."""
    family = CounterMetricFamily(f"gpupool_{name}", text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Buckets]]
) -> HistogramMetricFamily:
    """How often values of each size came."""
    family = HistogramMetricFamily(f"gpupool_{name}", text, labels=labels)
    for values, buckets in rows:
        family.add_metric(values, _cumulative(buckets), buckets.sum)
    return family


def _cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """Counts of all values up to each bound, which Prometheus wants."""
    total, found = 0, []
    for bound, count in zip((*buckets.bounds, math.inf), buckets.counts, strict=True):
        total += count
        found.append(("+Inf" if math.isinf(bound) else repr(bound), float(total)))
    return found
