"""The models: states, devices, and the reason when a model cannot serve.

Pure bookkeeping: the parts that load, mount and withdraw models report each step here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpupool_state import ModelRow
from gpupoold.control.fleet.states import (
    MODEL_TRANSITIONS,
    CircuitBreakers,
    DeviceSnapshots,
    Hosts,
    Life,
    ModelEvent,
    ModelPhase,
)
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.domain import ModelSpec, ModelState, Targets
from gpupoold.errors import Failed, Refused
from gpupoold.wire.messages import LoadedModel

_UNKNOWN = (ModelPhase.REMOVED, ModelPhase.PROPOSED)

Proposal = Life[ModelPhase, ModelEvent]

_STATES = {
    ModelPhase.REMOVED: ModelState.REGISTERED,
    ModelPhase.PROPOSED: ModelState.REGISTERED,
    ModelPhase.REGISTERED: ModelState.REGISTERED,
    ModelPhase.LOADING: ModelState.LOADING,
    ModelPhase.READY: ModelState.READY,
    ModelPhase.DRAINING: ModelState.DRAINING,
    ModelPhase.FAILED: ModelState.FAILED,
    ModelPhase.QUARANTINED: ModelState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Availability:
    """The ability of a model to serve, and the devices.

    ``devices`` are the numbers of the workers that have the model, also before the API is mounted;
    ``num_draining`` of these devices are draining. The last engine of a model that ``is_evicted``
    made place for another engine; a request loads the model again. ``reason`` says why the model
    has failed or is in quarantine, and ``retry_at_s`` is the time of the next try on the monotonic
    clock. ``waits_for`` names what is missing for the next step, if anything.
    """

    phase: ModelPhase
    devices: tuple[int, ...] = ()
    num_draining: int = 0
    reason: str = ""
    retry_at_s: float | None = None
    is_evicted: bool = False
    waits_for: str = ""

    @property
    def can_serve(self) -> bool:
        return self.phase is ModelPhase.READY and self.takes_requests

    @property
    def takes_requests(self) -> bool:
        """True if some device takes new requests of the model, or a request loads the model."""
        return len(self.devices) > self.num_draining or self.is_evicted

    @property
    def state(self) -> ModelState:
        """The phase as users see it."""
        return _STATES[self.phase]


@dataclass(slots=True)
class _Record:
    """One model; ``devices`` are in the order of their loads."""

    names: tuple[str, ...]
    life: Life[ModelPhase, ModelEvent]
    spec: ModelSpec | None = None
    devices: list[int] = field(default_factory=list)
    loaded: LoadedModel | None = None
    is_mounted: bool = False
    is_damaged: bool = False
    is_evicted: bool = False
    failure: str | None = None
    waits_for: str = ""
    num_drains: int = 0

    @classmethod
    def of(cls, names: Sequence[str]) -> _Record:
        return cls(tuple(names), Life(names[0], ModelPhase.REMOVED, MODEL_TRANSITIONS))

    @property
    def is_open(self) -> bool:
        return self.is_mounted and (bool(self.devices) or self.is_evicted)


class Fleet:
    """The models by name; one object per daemon, on its event loop."""

    def __init__(
        self,
        cache: SnapshotCache,
        without_snapshots: Iterable[int] = (),
        degrees: Sequence[int] = (),
    ) -> None:
        """See :class:`DeviceSnapshots` for the arguments."""
        self.hosts = Hosts()
        self.snapshots = DeviceSnapshots(cache, self.hosts, without_snapshots, degrees)
        self.breakers = CircuitBreakers()
        self._draining_devices: set[int] = set()
        self._records: dict[str, _Record] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._work: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        self._woken: set[str] = set()
        self._is_woken = asyncio.Event()

    def wake(self, *models: str) -> None:
        """Let the controller decide anew on models and publish their states, soon."""
        self._woken.update(models)
        self._is_woken.set()

    async def woken(self) -> set[str]:
        """Return the models that were woken since the last call, when ``wake`` has been called."""
        await self._is_woken.wait()
        self._is_woken.clear()
        woken, self._woken = self._woken, set()
        return woken

    def availability(self, model: str) -> Availability:
        record = self._of(model)
        return Availability(
            record.life.phase,
            tuple(record.devices),
            len(self._draining_devices.intersection(record.devices)),
            record.failure or "",
            self.breakers.retry_at_s(model),
            record.is_evicted,
            record.waits_for,
        )

    def names(self) -> list[str]:
        """Return the names of the registered models."""
        return [name for name in self._records if self.knows(name)]

    def is_warm(self, model: str) -> bool:
        """Return whether requests of the model can run now, on all devices that do not rest."""
        record = self._of(model)
        if record.is_damaged or record.is_evicted:
            return False
        devices = self.devices_with_snapshot(model)
        return not devices or self.snapshots.are_attached(model, devices)

    def devices_with_snapshot(self, model: str) -> list[int]:
        """Return the model's devices that need a snapshot."""
        return self.snapshots.needing(self._of(model).devices)

    def needed_snapshots(self, model: str) -> list[SnapshotId]:
        """Return the snapshots that the model's devices need."""
        return self.snapshots.all_of(model, self.devices_with_snapshot(model))

    def asleep(self) -> list[str]:
        """Return the models whose devices all rest."""
        devices = ((name, record.devices) for name, record in self._records.items())
        return [name for name, on in devices if on and self.snapshots.resting(name) >= {*on}]

    def num_served(self) -> int:
        """Return the number of models that some device has."""
        return sum(bool(record.devices) for record in self._records.values())

    # Changes of users, and the steps and additions that must end before.

    @contextlib.asynccontextmanager
    async def alone(self, model: str, *, beside_steps: bool = False) -> AsyncIterator[None]:
        """Change a model for a user: one change at a time, and no step meanwhile.

        Steps and additions under way end before, unless the change may be made ``beside_steps``.
        """
        async with self._locks[model]:
            while (work := self._work[model]) and not beside_steps:
                await asyncio.wait(work)
            try:
                yield
            finally:
                self.wake(model)

    def is_held(self, model: str) -> bool:
        """Return whether a user changes the model, or waits for the end of its steps to do so."""
        return self._locks[model].locked()

    def began(self, model: str, work: asyncio.Task[Any]) -> None:
        """Let changes of users wait for the end of a step or an addition."""
        self._work[model].add(work)
        work.add_done_callback(self._work[model].discard)

    def is_changing(self, model: str) -> bool:
        """Return whether a step, an addition or a change of a user is under way."""
        return bool(self._work[model]) or self.is_held(model)

    def knows(self, model: str) -> bool:
        """Return whether the model is registered."""
        return self._of(model).life.phase not in _UNKNOWN

    def targets(self, model: str, name: str = "") -> Targets:
        """Return the targets of a model, or of its preset or adapter called ``name``."""
        spec = self._records[model].spec
        assert spec is not None
        return spec.targets_of(name)

    def fixed_devices(self, model: str) -> tuple[int, ...]:
        """Return the devices chosen by hand for a model, empty for none."""
        spec = self._of(model).spec
        return () if spec is None else spec.devices

    def loaded(self, model: str) -> LoadedModel | None:
        """Return the facts of the model's latest load since the daemon's start."""
        return self._of(model).loaded

    def is_open(self, model: str) -> bool:
        """Return whether a device has the model and the API is mounted, in whatever phase."""
        return self._of(model).is_open

    # Additions and removals.

    def propose(self, names: Sequence[str]) -> Proposal:
        """Reserve the name and the aliases of a model that a client asks to add.

        ``drop_proposal`` releases the names unless the model has been registered. Raises Refused:
        one of the names is reserved already.
        """
        for record in self._records.values():
            for name in set(names).intersection(record.names):
                is_new = record.life.phase is ModelPhase.PROPOSED
                what = "being added already" if is_new else "still being removed"
                raise Refused(f"{name!r} is {what}", "wait until the addition or removal has ended")
        record = self._records[names[0]] = _Record.of(names)
        record.life.move(ModelEvent.PROPOSE)
        return record.life

    def drop_proposal(self, proposal: Proposal) -> None:
        """Release the names of a model that was not registered."""
        if proposal.phase is ModelPhase.PROPOSED:
            self.remove(proposal.subject)

    def register(self, spec: ModelSpec) -> None:
        record = self._records.setdefault(spec.name, _Record.of((spec.name,)))
        record.names, record.spec = (spec.name,), spec
        record.life.move(ModelEvent.REGISTER)
        self.breakers.reset(spec.name)  # the crashes were due to an earlier model of this name

    def restore(self, rows: Iterable[ModelRow]) -> None:
        """Register the models of the registry, in the states before the daemon's start."""
        for row in rows:
            self.register(row.spec)
            if row.state is ModelState.FAILED:
                self.fail(row.spec.name, row.error)
            elif row.state is not ModelState.REGISTERED:
                self.loading(row.spec.name)

    def remove(self, model: str) -> None:
        self._records[model].life.move(ModelEvent.REMOVE)
        self.breakers.reset(model)
        self.snapshots.forget(model)
        del self._records[model]

    def changed(self, spec: ModelSpec) -> None:
        """Record other targets, presets or adapters of a registered model."""
        self._records[spec.name].spec = spec
        self.wake(spec.name)

    # Loads and devices.

    def loading(self, model: str) -> None:
        """Record that some worker is about to load the model for the first time."""
        if self._records[model].life.phase is ModelPhase.REGISTERED:
            self._records[model].life.move(ModelEvent.LOAD)

    def check_quarantine(self, model: str) -> None:
        """Raise Failed while no worker may load the model."""
        reason = self.breakers.reason(model)
        if reason is not None:
            raise Failed(f"{model} {reason}", f"try again with `gpupool cache warm {model}`")

    def host(self, loaded: LoadedModel, number: int) -> None:
        """Add a device that has loaded the model."""
        record = self._records[loaded.name]
        record.loaded, record.is_evicted = loaded, False
        if number not in record.devices:
            record.devices.append(number)
        self.snapshots.wake(loaded.name, number)
        self._follow_facts(record)

    def unhost(self, model: str, number: int, *, is_evicted: bool = False) -> None:
        """Remove a device of the model.

        If the last engine ``is_evicted`` to make place for another engine, the model stays open,
        and a request loads the model again.
        """
        record = self._of(model)
        if number in record.devices:
            record.devices.remove(number)
            self.snapshots.wake(model, number)
            record.is_evicted = is_evicted and not record.devices
            self._follow_facts(record)

    def unhost_all(self, model: str) -> None:
        """Remove all devices of the model, for good."""
        record = self._of(model)
        record.devices.clear()
        self.snapshots.forget(model)
        record.is_evicted = False
        self._follow_facts(record)

    def lose_device(self, number: int) -> None:
        """Remove a device of all models."""
        for model in self._records:
            self.unhost(model, number)
        self.wake(*self._records)

    def drain_device(self, number: int, *, is_draining: bool) -> None:
        """Stop or resume new requests for a device."""
        (self._draining_devices.add if is_draining else self._draining_devices.discard)(number)

    def is_device_draining(self, number: int) -> bool:
        return number in self._draining_devices

    def is_damaged(self, model: str) -> bool:
        """Return whether the model's snapshots have to be made again."""
        return self._of(model).is_damaged

    def set_damaged(self, model: str, *, is_damaged: bool) -> None:
        """Record that the model's snapshots are damaged, or were made again."""
        self._of(model).is_damaged = is_damaged
        self.wake(model)

    def set_wait(self, model: str, waits_for: str) -> None:
        """Record what the model waits for, empty for nothing."""
        self._of(model).waits_for = waits_for

    # Mounts.

    def opened(self, model: str) -> None:
        """Record that the API of a loaded model is mounted: earlier failures are over.

        Has no effect if the model has been quarantined or removed meanwhile.
        """
        record = self._of(model)
        if self.breakers.reason(model) is not None:
            return
        record.is_mounted, record.failure = True, None
        if record.life.phase in (ModelPhase.REGISTERED, ModelPhase.FAILED, ModelPhase.QUARANTINED):
            record.life.move(ModelEvent.LOAD)
        self._follow_facts(record)

    def unmounted(self, model: str) -> None:
        """Record that the model must be loaded and mounted again before requests can be served."""
        record = self._of(model)
        record.loaded, record.is_mounted, record.is_evicted = None, False, False
        self._follow_facts(record)

    # Failures and drains.

    def fail(self, model: str, reason: str) -> None:
        """Record that no device could load the model, or with an open breaker may load the model.

        Has no effect on a model that is not registered.
        """
        record = self._of(model)
        if record.life.phase in _UNKNOWN:
            return
        record.failure = reason
        if record.is_evicted:
            record.is_evicted = False
            self._follow_facts(record)
        if record.life.phase is not ModelPhase.DRAINING:
            is_shut_out = self.breakers.is_shut_out(model)
            record.life.move(ModelEvent.QUARANTINE if is_shut_out else ModelEvent.FAIL)
        self.wake(model)

    def is_draining(self, model: str) -> bool:
        """Return whether the model takes no requests because of a removal or an unload."""
        return bool(self._of(model).num_drains)

    @contextlib.contextmanager
    def draining(self, model: str) -> Iterator[None]:
        """Drain the model inside the context; contexts may overlap."""
        record = self._records[model]
        if not record.num_drains:
            record.life.move(ModelEvent.DRAIN)
        record.num_drains += 1
        self.wake(model)
        try:
            yield
        finally:
            record.num_drains -= 1
            if not record.num_drains and record.life.phase is ModelPhase.DRAINING:
                self._resume(model, record)
            self.wake(model)

    def _of(self, model: str) -> _Record:
        """Return the record of a model; of an unknown model a new record, which is not kept."""
        record = self._records.get(model)
        return _Record.of((model,)) if record is None else record

    def _resume(self, model: str, record: _Record) -> None:
        if self.breakers.is_shut_out(model):
            record.life.move(ModelEvent.QUARANTINE)
        elif record.failure is not None:
            record.life.move(ModelEvent.FAIL)
        else:
            record.life.move(ModelEvent.RESUME)
            self._follow_facts(record)

    @staticmethod
    def _follow_facts(record: _Record) -> None:
        """Move between LOADING and READY, which needs a device and a mounted API."""
        if record.is_open and record.life.phase is ModelPhase.LOADING:
            record.life.move(ModelEvent.OPEN)
        elif not record.is_open and record.life.phase is ModelPhase.READY:
            record.life.move(ModelEvent.LOSE_DEVICES)
