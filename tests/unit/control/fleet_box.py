"""A fleet with loaded models, whose snapshots the test puts into host memory and takes out."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from gpupoold.config.schema import Settings, parse_settings
from gpupoold.config.sections import LimitSettings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.fleet.states import HostEvent
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.domain import ModelName, ModelSpec, Targets

LAYOUT = "layout"


class Warm:
    """The models whose snapshots are in host memory."""

    def __init__(self, cache: SnapshotCache) -> None:
        self._cache = cache

    def add(self, name: str) -> None:
        if self._cache.get(SnapshotId(name)) is None:
            self._cache.put(SnapshotId(name), os.memfd_create(name), LAYOUT)

    def discard(self, name: str) -> None:
        self._cache.drop(SnapshotId(name))

    def clear(self) -> None:
        for of in self._cache.snapshots:
            self._cache.drop(of)


class FleetBox:
    """Models that are registered, and loaded on the workers that ``come_up``."""

    def __init__(self, names: Sequence[str], targets: Targets | None = None) -> None:
        self.names = names
        self.cache = SnapshotCache(1 << 30)
        weakref.finalize(self, self.cache.close)
        self.fleet, self.warm = Fleet(self.cache), Warm(self.cache)
        for name in names:
            self.fleet.register(spec_of(name, targets))
            self.fleet.loading(name)

    def come_up(self, number: int) -> None:
        """The worker has loaded all models, and they are mounted."""
        self.fleet.hosts.lose_worker(number)
        for name in self.names:
            host = self.fleet.hosts.of(name, number)
            host.move(HostEvent.LOAD)
            host.loaded(LAYOUT, has_snapshot=True)
            self.fleet.opened(name)


def settings_with(limits: LimitSettings) -> Settings:
    settings = parse_settings({"devices": ["cuda:0"]}, "test")
    return settings.model_copy(update={"limits": limits})


def spec_of(name: str, targets: Targets | None = None) -> ModelSpec:
    return ModelSpec(ModelName(name), "s", "/p", targets=targets or Targets())
