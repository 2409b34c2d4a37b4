"""The text of ``/metrics``, made at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpupool_state import ModelRow
from gpupoold.control.control_plane import ControlPlane
from gpupoold.metrics.daemon_families import daemon_families
from gpupoold.metrics.device_families import device_families
from gpupoold.metrics.families import Family
from gpupoold.metrics.model_families import model_families
from gpupoold.metrics.picker_families import picker_families
from gpupoold.metrics.scrape import Scrape

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# More frequent scrapes get the same text: a scrape of a large box takes tens of milliseconds.
_HOLDS_S = 0.5


class Exporter:
    """A generator of one daemon's metrics; not thread-safe."""

    def __init__(
        self, control_plane: ControlPlane, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._pool = control_plane
        self._making = asyncio.Lock()
        self._text = b""
        self._rows: dict[str, ModelRow] = {}
        self._made_s: float | None = None

    async def text(self) -> bytes:
        """All metrics now, or half a second ago, in Prometheus' text format."""
        async with self._making:
            if self._made_s is None or self._clock() - self._made_s > _HOLDS_S:
                self._text = await self._make()
                self._made_s = self._clock()
            return self._text

    async def _make(self) -> bytes:
        found: list[Family] = []
        scrape = await Scrape.of(self._pool, self._rows)
        self._rows = scrape.rows
        for families in (model_families, device_families, daemon_families, picker_families):
            for family in families(scrape):
                found.append(family)
                await asyncio.sleep(0)  # tokens go first
        return await asyncio.to_thread(_text_of, found)


class _Found(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return (family.metric() for family in self._families)


def _text_of(families: Iterable[Family]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
