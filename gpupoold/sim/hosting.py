"""Hosting in a simulated box: engines that take memory outside the pages, and loads that take time.

The decisions are those of the daemon (:mod:`gpupoold.scheduling.hosting`). A load does not stop the
turns of its device, as in the daemon. A model that takes over an engine of its family, perhaps one
in use, needs no load; its snapshot counts as always known.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupoold.errors import UsageError
from gpupoold.scheduling.events import Hostable
from gpupoold.scheduling.hosting import (
    HOSTABLE_PERIOD_S,
    EngineWaits,
    HostedEngine,
    HostingDevice,
    HostingModel,
    HostingReason,
    choose,
    hostable_change,
    idle,
    is_late,
    is_taken_over,
    victims,
)
from gpupoold.scheduling.state import State
from gpupoold.sim.boxes import SimModel
from gpupoold.units import format_bytes

BIND_S = 0.01
"""Measured on emulated devices: a model takes over an engine of its family."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Costs of an engine: ``num_bytes`` of memory outside the pages on each GPU, and the seconds of
    a load. All engines of a GPU have at most ``limit_bytes``. ``own_bytes`` has the models whose
    engines are of another size.
    """

    num_bytes: int
    limit_bytes: int
    load_s: float
    own_bytes: tuple[tuple[str, int], ...] = ()

    def bytes_of(self, model: str) -> int:
        """Return the memory of a model's engine on each GPU."""
        return dict(self.own_bytes).get(model, self.num_bytes)

    def most_on_device(self, models: Collection[str]) -> int:
        """Return how many of the models' engines fit on a device, the smallest first."""
        sizes = sorted(map(self.bytes_of, models))
        return sum(total <= self.limit_bytes for total in itertools.accumulate(sizes))


class EngineLoad(NamedTuple):
    """A load or a takeover to begin: the ``evicted`` models lose their engines first.

    An engine that is shared leaves with requests.
    """

    device: int
    model: str
    evicted: tuple[str, ...]
    duration_s: float


class Hosting:
    """The engines on each device of a box.

    A device loads one engine at a time. ``num_loads`` counts the loads, without those before the
    first request, ``num_bound`` the engines that were taken over.
    """

    def __init__(
        self, costs: EngineCosts, models: Sequence[str], can_run: Sequence[Mapping[str, SimModel]]
    ) -> None:
        """Place the ``models`` in order, as far as the engines fit side by side.

        ``can_run`` has the models that each device can run, on that device. Models without a device
        are loaded when requests arrive.

        Raises:
            UsageError: a device has too little memory for one engine.
        """
        if unknown := [name for name, _ in costs.own_bytes if name not in models]:
            raise UsageError(
                f"--engine-memory names {', '.join(unknown)}, which is no model here",
                f"the models are {', '.join(list(models)[:20])}",
            )
        for name in models:
            if costs.bytes_of(name) > costs.limit_bytes:
                raise UsageError(
                    f"the engine of {name} takes {format_bytes(costs.bytes_of(name))} outside the "
                    f"pages, a GPU has {format_bytes(costs.limit_bytes)} for engines",
                    "raise --engines-limit",
                )
        self.costs = costs
        self._models = tuple(models)
        self._undivided = {
            name: frozenset(number for number, names in enumerate(can_run) if name not in names)
            for name in models
        }
        self._layouts = {
            name: {
                number: names[name].family for number, names in enumerate(can_run) if name in names
            }
            for name in models
        }
        self._engines: list[set[str]] = [set() for _ in can_run]
        self._loading: dict[int, str] = {}
        self._num_live: Counter[str] = Counter()
        self._used_at_s: dict[str, float] = {}
        self._since_s: dict[tuple[int, str], float] = {}  # the end of an engine's load
        self._waits = EngineWaits()
        self._homes: dict[str, int] = {}
        self._next_hostable_s = -math.inf
        self.num_loads = self.num_bound = 0
        self._place()

    def hosts(self) -> list[tuple[int, str]]:
        """Return each engine as device and model, in order."""
        return [(number, name) for number, on in enumerate(self._engines) for name in sorted(on)]

    @property
    def has_unhosted(self) -> bool:
        """Return whether requests wait for an engine."""
        hosted = set[str]().union(*self._engines)
        return any(num and name not in hosted for name, num in self._num_live.items())

    def arrived(self, model: str, now_s: float) -> bool:
        """Count a request; return whether its model has an engine."""
        self._num_live[model] += 1
        self._used_at_s[model] = now_s
        return any(model in on for on in self._engines)

    def ended(self, model: str, now_s: float) -> None:
        """Count the end of a request."""
        self._num_live[model] -= 1
        self._used_at_s[model] = now_s

    def due(self, state: State, now_s: float, *, needed_only: bool = False) -> list[EngineLoad]:
        """Begin the loads that are due, at most one on each device, and return them.

        With ``needed_only`` the loads of models without an engine.
        """
        self._homes = {
            model.name: model.home.device for model in state.models.values() if model.home
        }
        asked = [model for model in self._models if self._num_live[model] or model in self._homes]
        if needed_only:
            hosted = set[str]().union(*self._engines)
            asked = [model for model in asked if model not in hosted and self._num_live[model]]
        if not asked:
            return []
        num_requests = Counter(request.device for request in state.requests.values())

        def look(number: int) -> HostingDevice:
            device = state.devices[number]
            moving = {request.model.name for request in device.moving.values()}
            on_device = device.models_with_requests
            return self._device(number, on_device, num_requests[number], now_s, moving)

        devices = [look(number) for number in self._numbers]
        loads: list[EngineLoad] = []
        for name in asked:
            if len(self._loading) == len(self._engines):
                break
            if name in self._loading.values():
                continue
            # Only a device without work helps late requests.
            can_help = any(not (device.num_requests or device.num_loads) for device in devices)
            late = can_help and is_late(state, name, now_s)
            model = self._model(name, is_late=late, is_next=self._is_next(name, now_s))
            chosen = choose(model, devices)
            if chosen and chosen[0].device not in self._loading:
                number = chosen[0].device
                loads.append(self._begin(name, devices[number], chosen[0].reason))
                devices[number] = look(number)
        return loads

    def _begin(self, name: str, device: HostingDevice, reason: HostingReason) -> EngineLoad:
        layout = self._layouts[name][device.number]
        gone = victims(device, self.costs.bytes_of(name), reason, layout, self._family(name))
        assert gone is not None, "the choice had checked it"
        self._engines[device.number] -= set(gone)
        self._loading[device.number] = name
        is_bound = is_taken_over(device, gone, layout)
        self.num_bound += is_bound
        self.num_loads += not is_bound
        return EngineLoad(
            device.number, name, tuple(gone), BIND_S if is_bound else self.costs.load_s
        )

    def hostable(self, state: State, now_s: float) -> list[Hostable]:
        """Return the changes of the devices that could run models, as often as the daemon does."""
        if now_s < self._next_hostable_s:
            return []
        self._next_hostable_s = now_s + HOSTABLE_PERIOD_S
        devices = [idle(self._device(number, now_s=now_s)) for number in self._numbers]
        changes = (hostable_change(state, self._model(name), devices) for name in self._models)
        return [change for change in changes if change is not None]

    def loaded(self, device: int, now_s: float) -> str:
        """End the load of a device; return the model."""
        name = self._loading.pop(device)
        self._engines[device].add(name)
        self._since_s[device, name] = now_s
        self._waits.end(name)
        return name

    @property
    def _numbers(self) -> range:
        return range(len(self._engines))

    def _place(self) -> None:
        """Load the models in order, each on all devices with memory; evict no model's only engine.

        A later model replaces engines of models that have another device.
        """
        for name in self._models:
            devices = [self._device(number) for number in self._numbers]
            for choice in choose(self._model(name), devices):
                device = devices[choice.device]
                gone = victims(device, self.costs.bytes_of(name), choice.reason)
                if gone is not None and not any(device.engines[name].is_only for name in gone):
                    self._engines[choice.device] -= set(gone)
                    self._engines[choice.device].add(name)

    def _is_next(self, name: str, now_s: float) -> bool:
        """Return whether a model with requests has waited longest for an engine of its family."""
        if not self._num_live[name] or any(name in on for on in self._engines):
            return False
        return self._waits.is_next(
            name, now_s, lambda other: self._family(other) == self._family(name)
        )

    def _family(self, name: str) -> str:
        return next(iter(self._layouts[name].values()), "")

    def _model(self, name: str, *, is_late: bool = False, is_next: bool = False) -> HostingModel:
        need_bytes = dict.fromkeys(self._numbers, self.costs.bytes_of(name))
        return HostingModel(
            name,
            need_bytes=need_bytes,
            is_late=is_late,
            home=self._homes.get(name),
            undivided=self._undivided[name],
            layouts=self._layouts[name],
            family=self._family(name),
            is_next=is_next,
        )

    def _device(
        self,
        number: int,
        on_device: Collection[str] = (),
        num_requests: int = 0,
        now_s: float = 0.0,
        moving: Collection[str] = (),
    ) -> HostingDevice:
        """Return a device for a decision; an engine that loads has its memory, and is busy.

        No other model shares an engine that loads, or to which requests are ``moving``.
        """
        loading = {self._loading[number]} if number in self._loading else set[str]()
        busy, names = loading.union(on_device), sorted(loading | self._engines[number])
        engines = {name: self._engine(name, number, now_s, is_busy=name in busy) for name in names}
        for name in loading.union(moving).intersection(engines):
            engines[name] = replace(engines[name], served_s=0.0)
        return HostingDevice(
            number,
            engines,
            self.costs.limit_bytes,
            num_requests,
            len(loading),
        )

    def _engine(self, name: str, number: int, now_s: float, *, is_busy: bool) -> HostedEngine:
        others = (on for other, on in enumerate(self._engines) if other != number)
        is_only = not any(name in on for on in others)
        return HostedEngine(
            name,
            self.costs.bytes_of(name),
            is_busy=is_busy or (is_only and self._num_live[name] > 0),
            is_only=is_only,
            is_home=self._homes.get(name) == number,
            idle_s=now_s - self._used_at_s.get(name, -math.inf),
            layout=self._layouts[name][number],
            family=self._layouts[name][number],
            served_s=now_s - self._since_s.get((number, name), 0.0),
        )
