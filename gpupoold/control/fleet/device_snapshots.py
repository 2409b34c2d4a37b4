"""The snapshots that the models' devices need, and the devices that rest without. Bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpupoold.control.fleet.hosts import Hosts
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId


class DeviceSnapshots:
    """The snapshots by device.

    Devices of one degree share a snapshot. If the model cache has too little memory for a model's
    snapshots of all degrees, the devices of a degree without a snapshot rest: the engines stay, and
    the other devices serve the model.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        hosts: Hosts,
        without_snapshots: Iterable[int] = (),
        degrees: Sequence[int] = (),
    ) -> None:
        """``without_snapshots`` are the numbers of the simulated devices, ``degrees`` the numbers
        of GPUs by device; further devices have one.
        """
        self._cache = cache
        self._hosts = hosts
        self._without_snapshots = frozenset(without_snapshots)
        self._degrees = dict(enumerate(degrees))
        self._resting: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def degrees(self) -> set[int]:
        """The degrees of all devices with snapshots."""
        return {self.degree(number) for number in self.needing(self._degrees)} or {1}

    def degree(self, number: int) -> int:
        """Return the number of GPUs of a device."""
        return self._degrees.get(number, 1)

    def of(self, model: str, number: int) -> SnapshotId:
        """Return the name of the snapshot that a device needs for a model."""
        return SnapshotId(model, self.degree(number))

    def all_of(self, model: str, numbers: Iterable[int]) -> list[SnapshotId]:
        """Return the names of the snapshots that devices need for a model."""
        return sorted({self.of(model, number) for number in self.needing(numbers)})

    def needing(self, numbers: Iterable[int]) -> list[int]:
        """Return the devices that need snapshots."""
        return [number for number in numbers if number not in self._without_snapshots]

    def are_attached(self, model: str, numbers: Iterable[int]) -> bool:
        """Return whether all devices that do not rest, and at least one, have the snapshot."""
        awake = [number for number in numbers if number not in self._resting[model]]
        attached = all(self._hosts.of(model, number).has_snapshot for number in awake)
        cached = all(self._cache.get(one) is not None for one in self.all_of(model, awake))
        return bool(awake) and attached and cached

    def rest(self, model: str, number: int) -> None:
        """Record that a device has no snapshot, while other devices serve the model."""
        self._resting[model].add(number)

    def wake(self, model: str, number: int) -> None:
        """Record that a device has the snapshot again, or no longer the engine."""
        self._resting[model].discard(number)

    def resting(self, model: str) -> frozenset[int]:
        """Return the devices with the engine but without a snapshot, while others serve."""
        return frozenset(self._resting[model])

    def forget(self, model: str) -> None:
        self._resting.pop(model, None)
