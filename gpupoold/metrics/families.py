"""The data of one scrape, and metric families as plain data.

Gathering is quick; the conversion to the Prometheus client's objects takes ten times as long and
can run in another thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gpupool_state import ModelRow
from gpupoold.control.accounting.meters import DeviceMeter, ModelMeter
from gpupoold.control.accounting.model_stats import Counts, ModelStats
from gpupoold.control.control_plane import ControlPlane
from gpupoold.control.workers.worker import Worker
from gpupoold.errors import Failed
from gpupoold.stats.histogram import LATENCY_BOUNDS_S, Histogram
from gpupoold.wire.messages import DraftCounts, ModelMemory

T = TypeVar("T")
# The values of a sample's labels, and the sample's value; None leaves the sample out.
Row = tuple[Sequence[str], float | None]

_logger = logging.getLogger(__name__)


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
        return make(name, text, (label,), (((key,), value(item)) for key, item in known))

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


@dataclass(frozen=True, slots=True)
class Scrape:
    """The control plane and its models by name: counts, attainment of the last minute.

    Requests of a preset or adapter count under its name, memory and states under its model's name.
    An attainment is None without tokens. Bytes of saved snapshots are None if the disk cannot be
    read. ``drafts`` has the models with speculative decoding, ``waiting`` the number of live
    requests before their first step by model.
    """

    control_plane: ControlPlane
    rows: dict[str, ModelRow]
    counts: dict[str, Counts]
    attainments: dict[str, float | None]
    saved_bytes: int | None
    drafts: dict[str, DraftCounts]
    background_tokens: dict[str, int]
    paced: dict[str, Histogram]
    waiting: Counter[str]

    @classmethod
    async def of(cls, control_plane: ControlPlane, known: dict[str, ModelRow]) -> Scrape:
        """Collect the data; drop counts of models that are no longer registered.

        If the registry cannot be read, the models ``known`` from an earlier scrape are used,
        because metrics matter most while a disk fails.
        """
        try:
            rows = {str(row.spec.name): row for row in await control_plane.registry.list()}
        except Failed as error:
            _logger.warning("metrics of the models known before: %s", error)
            rows = known
        else:
            control_plane.dispatcher.accounts.meters.forget_others(_names(rows))
        try:
            saved_bytes = await control_plane.saved.used_bytes()
        except OSError as error:
            _logger.warning("the folder of saved snapshots cannot be read: %s", error)
            saved_bytes = None
        now_s = time.monotonic()
        stats = {
            name: control_plane.dispatcher.accounts.stats.get(name, ModelStats())
            for name in _names(rows)
        }
        return cls(
            control_plane,
            rows,
            {name: model.so_far_with_latencies() for name, model in stats.items()},
            {name: model.attainment_1m(now_s) for name, model in stats.items()},
            saved_bytes,
            {name: model.drafts for name, model in stats.items() if model.drafts.num_drafts},
            {name: model.background_tokens for name, model in stats.items()},
            {name: model.paced for name, model in stats.items() if len(model.paced)},
            _waiting(control_plane, rows),
        )

    def models(self) -> Iterator[tuple[str, ModelMeter]]:
        """Yield all models, presets and adapters by name, with meters."""
        for name in self.names:
            yield name, self.control_plane.dispatcher.accounts.meters.models[name]

    @property
    def names(self) -> list[str]:
        """The names of all models, presets and adapters."""
        return _names(self.rows)

    @property
    def workers(self) -> list[Worker]:
        return self.control_plane.supervisor.workers

    def devices(self) -> Iterator[tuple[str, Worker]]:
        """Yield all workers by the number of their device."""
        for worker in self.workers:
            yield str(worker.number), worker

    def meters(self) -> Iterator[tuple[str, DeviceMeter]]:
        """Yield the meters of all devices by number."""
        for number, worker in self.devices():
            yield number, self.control_plane.dispatcher.accounts.meters.devices[worker.number]


def _names(rows: dict[str, ModelRow]) -> list[str]:
    further = (name_row.name for row in rows.values() for name_row in row.spec.further)
    return [*rows, *further]


def _waiting(control_plane: ControlPlane, rows: dict[str, ModelRow]) -> Counter[str]:
    live = control_plane.dispatcher.live
    waiting = Counter({name: live.num_waiting(name) for name in rows})
    for worker in control_plane.supervisor.workers:
        for held in memories(worker):
            waiting[held.model] += held.num_waiting
    return waiting


def memories(worker: Worker) -> list[ModelMemory]:
    """Return the models' memory in a worker's latest report, empty while the worker is down."""
    return worker.status.models if worker.status else []
