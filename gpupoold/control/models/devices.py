"""The memory of engines outside the pages of devices."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpupool_state import ModelRow
from gpupoold.control.fleet.states import Host, ModelPhase
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.models.descriptions import have_equal_steps
from gpupoold.control.models.inspection import Divisions
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.steps import EnginesFull
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Role
from gpupoold.errors import GpupoolError, NoSuchModel, Unavailable
from gpupoold.scheduling.hosting import (
    EngineWaits,
    HostedEngine,
    HostingDevice,
    HostingModel,
    HostingReason,
    hostable_change,
    idle,
    is_late,
    is_taken_over,
    served_s,
    slack_of,
    slack_on,
    victims,
)
from gpupoold.scheduling.state import DeviceState
from gpupoold.units import format_bytes

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineClaim:
    """A load's claim to the place of an idle model's engine on a device.

    With ``keeps_engine`` the claimant takes the engine over. An engine that ``is_shared`` leaves
    with requests, which wait. ``answered`` is done when the engine has left, or the model is no
    longer idle.
    """

    holder: str
    claimant: str
    keeps_engine: bool = False
    is_shared: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class EngineRoom(ModelPart):
    """Counts the memory of engines; ``claims`` has by device which engine should make place."""

    def __init__(self, parts: ControlParts, cache: SnapshotCache, divisions: Divisions) -> None:
        super().__init__(parts)
        self._cache = cache
        self.divisions = divisions
        self.claims: dict[int, EngineClaim] = {}
        self._waits = EngineWaits()

    def limit_bytes(self, worker: Worker) -> int | None:
        """Return the limit of a device's engines outside the pages, None for no limit."""
        free_bytes = None if worker.ready is None else worker.ready.reserve_free_bytes
        return self._settings.memory.engines_for(free_bytes, worker.device.num_gpus)

    def devices(self) -> list[HostingDevice]:
        """Return the devices that can load."""
        return [self.device(worker) for worker in self._supervisor.workers if worker.is_ready]

    def large_enough(
        self, devices: Sequence[HostingDevice], weight_bytes: int
    ) -> Sequence[HostingDevice]:
        """Return the devices; those too small for ``weight_bytes`` only if there are no others."""
        workers = self._supervisor.workers
        ready = [(device, workers[device.number].ready) for device in devices]
        large = [each for each, up in ready if up and up.facts.device_bytes > weight_bytes]
        return large or devices

    def device(self, worker: Worker) -> HostingDevice:
        """Return a device with its engines for a decision of the scheduling core."""
        number = worker.number
        known = self._dispatcher.state.devices.get(number)
        engines = self._fleet.hosts.engines_on(number)
        on_device = known.models_with_requests if known else set[str]()
        return HostingDevice(
            number,
            {
                name: self._engine(name, number, engines, known if name in on_device else None)
                for name in engines
            },
            self.limit_bytes(worker),
            known.num_requests if known else 0,
            worker.num_loads,
            self._fleet.is_device_draining(number),
            self._fleet.hosts.kept_bytes(number),
            known.role if known else Role.MIXED,
        )

    def model(self, row: ModelRow, now_s: float | None = None) -> HostingModel:
        """Return a model for a decision of the scheduling core; without a time it is not late."""
        name = row.spec.name
        workers = [worker for worker in self._supervisor.workers if worker.ready is not None]
        is_asked = bool(self._dispatcher.live.num_of(name))
        deadlines_s = [request.next_deadline_s for request in self._urgent(name)]
        return HostingModel(
            name,
            frozenset(row.spec.devices),
            {worker.number: self._need_bytes(row, worker) for worker in workers},
            is_wanted=is_asked or not self._fleet.availability(name).is_evicted,
            is_late=now_s is not None and is_asked and is_late(self._dispatcher.state, name, now_s),
            home=self._home(name),
            undivided=self.divisions.lacking(row.spec),
            layouts={worker.number: self._layout_of(name, worker) for worker in workers},
            family=self._fleet.hosts.family_of(name),
            slack_s=math.inf if now_s is None else slack_of(deadlines_s, now_s),
            is_starving=now_s is not None and self._is_starving(name, now_s),
        )

    def _is_starving(self, name: str, now_s: float) -> bool:
        """Return whether a model with requests has waited longest, and long, for an engine."""
        if self._fleet.availability(name).devices or not self._urgent(name):
            self._waits.end(name)
            return False
        family_of = self._fleet.hosts.family_of

        def is_rival(other: str) -> bool:
            is_alike = family_of(other) == family_of(name)
            # A model that changes gets an engine.
            return is_alike and bool(self._urgent(other)) and not self._fleet.is_changing(other)

        return self._waits.is_starving(name, now_s, is_rival)

    def _urgent(self, name: str) -> list[LiveRequest]:
        """Return the requests of a model that wait neither for idle devices nor for a trial."""
        requests = self._dispatcher.live.of_model(name)
        return [request for request in requests if not (request.is_background or request.is_held)]

    async def make(
        self, name: str, worker: Worker, reason: HostingReason, *, beside_itself: bool = False
    ) -> None:
        """Return when idle engines have made place; the caller holds the worker's load lock.

        With ``beside_itself`` the model's present engine stays until the other has been loaded.

        Raises:
            EnginesFull: the other engines may not leave.
            NoSuchModel: the model has been removed.
        """
        row = await self._registry.get(name)
        if row is None:
            raise NoSuchModel(f"no model is named {name!r}")
        number, num_bytes = worker.number, self._need_bytes(row, worker)
        layout = "" if beside_itself else self._layout_of(name, worker)
        if not layout and not beside_itself and self.device(worker).short_bytes(num_bytes):
            layout = await self._layout_of_sibling(row, worker)
        need_bytes = {number: 2 * num_bytes if beside_itself else num_bytes}
        model = self.model(row, time.monotonic())
        model = replace(model, need_bytes=need_bytes, layouts={number: layout})
        await self._claim(model, worker, reason)

    async def settle(self, name: str, worker: Worker, reason: HostingReason) -> None:
        """Let other engines make place if a loaded engine is larger than expected.

        Raises EnginesFull: the other engines may not leave; the caller unloads the engine.
        """
        memory = self._fleet.hosts.of(name, worker.number).memory
        model = HostingModel(name, need_bytes={worker.number: memory.device_bytes})
        await self._claim(model, worker, reason)

    def may_leave(self, name: str, number: int) -> bool:
        """Return whether another model claims the place of a model's idle engine on a device."""
        claim, known = self.claims.get(number), self._dispatcher.state.devices.get(number)
        if claim is not None and claim.holder == name and claim.is_shared:
            return name in self._fleet.hosts.engines_on(number)
        if claim is None or claim.holder != name or (known and name in known.models_with_requests):
            return False
        is_asked = self._is_only(name, number) and bool(self._dispatcher.live.num_of(name))
        return not is_asked and name in self._fleet.hosts.engines_on(number)

    def why_none(self, row: ModelRow) -> GpupoolError:
        """Return why no device can load the model: memory, with the arithmetic, or service.

        Raises Refused: no device can divide the model.
        """
        if any(self.model(row).allows(device.number) for device in self.devices()):
            return self.refusal(row)
        self.divisions.require_one(row.spec)
        where = f" (only {', '.join(map(str, row.spec.devices))} may)" if row.spec.devices else ""
        return Unavailable(
            f"no device in service can load {row.spec.name}{where}",
            "see `gpupool ps` and `gpupool logs`",
        )

    def refusal(self, row: ModelRow) -> EnginesFull:
        """Return why no device can host the model, with the arithmetic."""
        devices = [device for device in self.devices() if self.model(row).allows(device.number)]
        workers = self._supervisor.workers
        needs = [self._need_bytes(row, workers[device.number]) for device in devices]
        return _full(row.spec.name, "; ".join(map(_arithmetic, devices, needs)))

    async def plan_homes(self) -> None:
        """Tell the scheduling core which devices could host which models."""
        devices, state = [idle(device) for device in self.devices()], self._dispatcher.state
        for row in await self._registry.list():
            now = self._fleet.availability(row.spec.name)
            is_served = now.phase in (ModelPhase.READY, ModelPhase.LOADING)
            if is_served and now.retry_at_s is None:
                change = hostable_change(state, self.model(row), devices)
                if change is not None:
                    self._dispatcher.shell.handle(change)

    def _need_bytes(self, row: ModelRow, worker: Worker) -> int:
        """Return the memory of the model's engine as measured before, else as of its neighbours."""
        kind = "" if worker.ready is None else worker.ready.device_name
        if kind in row.engine_bytes:
            return row.engine_bytes[kind]
        return self._fleet.hosts.usual_bytes(worker.number) or 0

    def _engine(
        self, name: str, number: int, engines: Mapping[str, Host], known: DeviceState | None
    ) -> HostedEngine:
        """Return an engine; ``known`` is a device with requests of the model."""
        num_bytes, freed_bytes = engines[name].memory.device_bytes, None
        if self._fleet.hosts.first_on(number) == name:  # charged with libraries and kernels too
            usual_bytes = self._fleet.hosts.usual_bytes(number, besides=name)
            freed_bytes = None if usual_bytes is None else min(num_bytes, usual_bytes)
        is_only, is_changing = self._is_only(name, number), self._fleet.is_changing(name)
        is_asked = is_only and bool(self._dispatcher.live.num_of(name))
        slack_s = 0.0
        if known is not None and not is_changing:
            slack_s = slack_on(known, name, time.monotonic())
        return HostedEngine(
            name,
            num_bytes,
            is_busy=known is not None or is_asked or is_changing,
            is_only=is_only,
            is_fixed=number in self._fleet.fixed_devices(name),
            is_home=self._home(name) == number,
            idle_s=time.time() - (self._cache.last_used_at(name) or 0.0),
            freed_bytes=freed_bytes,
            layout=engines[name].layout_digest if engines[name].family else "",
            family=engines[name].family,
            served_s=0.0 if is_changing else self._served_s(name, number, engines[name].since_s),
            slack_s=slack_s,
        )

    def _served_s(self, name: str, number: int, since_s: float) -> float:
        here = [each for each in self._urgent(name) if each.device in (number, None)]
        return served_s(since_s, (request.last_sign_s for request in here), time.monotonic())

    def _layout_of(self, name: str, worker: Worker) -> str:
        """Return the digest of the layout of a model's cached snapshot.

        Empty without a snapshot, and for a model that shares no engine.
        """
        if self._fleet.hosts.families.get(name) == "":
            return ""
        snapshot = self._cache.get(self._fleet.snapshots.of(name, worker.number))
        return "" if snapshot is None else snapshot.digest

    async def _layout_of_sibling(self, row: ModelRow, worker: Worker) -> str:
        """Return the layout of a fine-tune of the same model with an engine on the worker.

        The worker compares layouts when it has read the model.
        """
        engines = self._fleet.hosts.engines_on(worker.number)
        for other in await self._registry.list():
            if (engine := engines.get(other.spec.name)) is None or other.spec.name == row.spec.name:
                continue
            if await asyncio.to_thread(have_equal_steps, row.spec, other.spec):
                return engine.layout_digest
        return ""

    def _is_only(self, name: str, number: int) -> bool:
        """Return whether no other device takes new requests of a model."""
        others = [device for device in self._fleet.availability(name).devices if device != number]
        return all(self._fleet.is_device_draining(other) for other in others)

    def _home(self, name: str) -> int | None:
        """Return the device that the policy plans for a model's requests."""
        model = self._dispatcher.state.models.get(name)
        return None if model is None or model.home is None else model.home.device

    async def _claim(self, asks: HostingModel, worker: Worker, reason: HostingReason) -> None:
        """Claim the place of one idle engine after another, which their models' controllers give.

        Each model is asked once; an engine that did not leave counts as busy. An engine of the
        layout that is asked for, if any, is kept for the load and the only one that leaves.
        """
        name = asks.name
        asked: set[str] = set()
        while True:
            device = self.device(worker)
            others = {
                model: replace(engine, is_busy=True, family="") if model in asked else engine
                for model, engine in device.engines.items()
                if model != name
            }
            device = replace(device, engines=others)
            chosen = victims(asks, device, reason)
            if chosen is None:
                raise _full(name, _arithmetic(device, asks.need(device.number)))
            if not chosen:
                return
            asked.add(chosen[0])
            is_shared = others[chosen[0]].is_busy
            keeps_engine = is_shared or is_taken_over(asks, device, chosen)
            claim = EngineClaim(chosen[0], name, keeps_engine, is_shared)
            self.claims[worker.number] = claim
            self._fleet.wake(*chosen[:1])
            try:
                await claim.answered.wait()
            finally:
                del self.claims[worker.number]
            if self._fleet.hosts.kept_engine(worker.number) == chosen[0]:
                return


def _full(name: str, text: str) -> EnginesFull:
    return EnginesFull(
        f"{name}: too little memory for another engine outside the pages: {text}",
        "wait until requests have ended, remove a model, or raise memory.engines or memory.reserve",
    )


def _arithmetic(device: HostingDevice, num_bytes: int) -> str:
    parts = [
        f"{engine.model} {format_bytes(engine.num_bytes)}{_why_stays(engine)}"
        for engine in sorted(
            device.engines.values(), key=lambda engine: (-engine.num_bytes, engine.model)
        )
        if engine.num_bytes
    ]
    if device.kept_bytes:
        parts.append(f"libraries {format_bytes(device.kept_bytes)}")
    held = ", ".join(parts)
    return (
        f"about {format_bytes(num_bytes)} are needed on device {device.number}, where "
        f"{format_bytes(device.used_bytes)} of {format_bytes(device.limit_bytes or 0)} are used "
        f"({held or 'no engines'})"
    )


def _why_stays(engine: HostedEngine) -> str:
    return " chosen by hand" if engine.is_fixed else " in use" if engine.is_busy else ""
