"""The models and snapshots on the workers. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from gpupoold.control.fleet.transitions import HOST_TRANSITIONS, HostEvent, HostPhase, Life
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.wire.messages import EngineMemory

Engines = dict[str, dict[int, EngineMemory]]
"""The memory of engines, by model and worker."""

NOTHING = EngineMemory()
_WITH_ENGINE = (HostPhase.LOADED, HostPhase.ATTACHED, HostPhase.UNLOADING)


class Host:
    """A model on one worker; ``layout_digest`` is the digest of the loaded layout.

    ``memory`` is the memory of the model's engine outside the pages, ``why`` the reason for the
    engine on this worker, and ``options`` are the engine's options, None while the
    engine is being replaced, or if nobody has waited for the end.
    """

    def __init__(self, model: str, number: int) -> None:
        self._life = Life(f"{model} on worker {number}", HostPhase.ABSENT, HOST_TRANSITIONS)
        self.layout_digest = ""
        self.memory = NOTHING
        self.why = ""
        self.options: Mapping[str, str] | None = {}

    @property
    def phase(self) -> HostPhase:
        return self._life.phase

    @property
    def is_ordered(self) -> bool:
        """True if the worker has, or will have, the model."""
        return self.phase not in (HostPhase.ABSENT, HostPhase.UNLOADING)

    @property
    def has_snapshot(self) -> bool:
        """True if the model can be restored from an attached snapshot."""
        return self.phase is HostPhase.ATTACHED

    def note(self, event: HostEvent) -> None:
        """Change the phase."""
        self._life.move(event)

    def loaded(
        self, layout_digest: str, memory: EngineMemory = NOTHING, *, has_snapshot: bool
    ) -> None:
        """Record the end of a load."""
        self.note(HostEvent.LOADED)
        self.layout_digest, self.memory = layout_digest, memory
        if has_snapshot:
            self.note(HostEvent.ATTACH)

    def replaced(
        self, layout_digest: str, memory: EngineMemory = NOTHING, *, has_snapshot: bool
    ) -> None:
        """Record that another engine of the loaded model has taken the engine's place."""
        if self.phase is HostPhase.LOADED and has_snapshot:
            self.note(HostEvent.ATTACH)
        self.layout_digest, self.memory = layout_digest, memory


class Hosts:
    """The hosts by worker number and model; created on first use."""

    def __init__(self) -> None:
        self._hosts: defaultdict[int, dict[str, Host]] = defaultdict(dict)
        self._firsts: dict[int, str] = {}
        self._kept_bytes: dict[int, int] = {}

    def of(self, model: str, number: int) -> Host:
        """Return the model's host on a worker, which lasts until the worker ends."""
        host = self._hosts[number].get(model)
        if host is None:
            host = self._hosts[number][model] = Host(model, number)
        return host

    def loaded(self, model: str, number: int) -> None:
        """Record a load, the first on a worker perhaps."""
        self._firsts.setdefault(number, model)

    def freed(self, model: str, number: int, num_bytes: int) -> None:
        """Record the memory outside the pages that a worker gave back at the end of an engine.

        The first engine's load also takes memory of the process that all engines share, such as
        libraries and kernels, which stays. A busy worker frees an engine only later: then the
        median of the other engines counts as given back.
        """
        if self._firsts.get(number) == model:
            self._firsts[number] = ""
            freed_bytes = max(num_bytes, self.usual_bytes(number, besides=model) or 0)
            taken_bytes = self.of(model, number).memory.device_bytes
            self._kept_bytes[number] = max(0, taken_bytes - freed_bytes)

    def usual_bytes(self, number: int, besides: str = "") -> int | None:
        """Return the median memory of a worker's engines without one model's, None without any."""
        engines = self.engines_on(number)
        others = [one.device_bytes for name, one in engines.items() if name != besides]
        return median_low(others) if others else None

    def first_on(self, number: int) -> str:
        """Return the model that a worker loaded first, empty if none or unloaded meanwhile."""
        return self._firsts.get(number, "")

    def kept_bytes(self, number: int) -> int:
        """Return the memory outside the pages that a worker kept at the end of an engine."""
        return self._kept_bytes.get(number, 0)

    def engines_on(self, number: int) -> dict[str, EngineMemory]:
        """Return the memory of the engines on a worker, by model."""
        hosts = self._hosts[number]
        return {name: one.memory for name, one in hosts.items() if one.phase in _WITH_ENGINE}

    def engines(self) -> Engines:
        """Return the memory of all engines, by model and worker."""
        found: Engines = {}
        for number in sorted(self._hosts):
            for model, memory in self.engines_on(number).items():
                found.setdefault(model, {})[number] = memory
        return found

    def lose_worker(self, number: int) -> None:
        """Record the end of a worker's process, and of all models there."""
        self._firsts.pop(number, None)
        self._kept_bytes.pop(number, None)
        for host in self._hosts.pop(number, {}).values():
            host.note(HostEvent.LOSE_WORKER)


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
