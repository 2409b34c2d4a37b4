"""Hosting in a simulated box: engines that take memory outside the pages, and loads that take time.

The decisions are those of the daemon (:mod:`gpupoold.scheduling.hosting`). A load does not stop the
turns of its device, as in the daemon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupoold.errors import UsageError
from gpupoold.scheduling.events import Hostable
from gpupoold.scheduling.hosting import (
    HostedEngine,
    HostingDevice,
    HostingModel,
    choose,
    hostable_change,
    idle,
    is_late,
    victims,
)
from gpupoold.scheduling.state import State
from gpupoold.units import format_bytes


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


class EngineLoad(NamedTuple):
    """A load to begin: the engines of the ``evicted`` models leave the device first."""

    device: int
    model: str
    evicted: tuple[str, ...]


class Hosting:
    """The engines on each device of a box.

    A device loads one engine at a time. ``num_loads`` counts the loads, without those before the
    first request.
    """

    def __init__(
        self, costs: EngineCosts, models: Sequence[str], can_run: Sequence[Collection[str]]
    ) -> None:
        """Place the ``models`` in order, as far as the engines fit side by side.

        ``can_run`` has the models that each device can run. Models without a device are loaded
        when requests arrive.

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
        self._engines: list[set[str]] = [set() for _ in can_run]
        self._loading: dict[int, str] = {}
        self._num_live: Counter[str] = Counter()
        self._used_at_s: dict[str, float] = {}
        self._homes: dict[str, int] = {}
        self.num_loads = 0
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

    def due(self, state: State, now_s: float) -> list[EngineLoad]:
        """Begin the loads that are due, at most one on each device, and return them."""
        self._homes = {
            model.name: model.home.device for model in state.models.values() if model.home
        }
        asked = [model for model in self._models if self._num_live[model] or model in self._homes]
        if not asked:
            return []
        num_requests = Counter(request.device for request in state.requests.values())

        def look(number: int) -> HostingDevice:
            on_device = state.devices[number].models_with_requests
            return self._device(number, on_device, num_requests[number], now_s)

        devices = [look(number) for number in self._numbers]
        loads: list[EngineLoad] = []
        for name in asked:
            if len(self._loading) == len(self._engines):
                break
            if name in self._loading.values():
                continue
            chosen = choose(self._model(name, is_late=is_late(state, name, now_s)), devices)
            if chosen and chosen[0].device not in self._loading:
                number = chosen[0].device
                num_bytes = self.costs.bytes_of(name)
                gone = victims(devices[number], num_bytes, chosen[0].reason)
                assert gone is not None, "the choice had checked it"
                self._engines[number] -= set(gone)
                self._loading[number] = name
                self.num_loads += 1
                loads.append(EngineLoad(number, name, tuple(gone)))
                devices[number] = look(number)
        return loads

    def hostable(self, state: State, now_s: float) -> list[Hostable]:
        """Return the changes of the devices that could run models."""
        devices = [idle(self._device(number, now_s=now_s)) for number in self._numbers]
        changes = (hostable_change(state, self._model(name), devices) for name in self._models)
        return [change for change in changes if change is not None]

    def loaded(self, device: int) -> str:
        """End the load of a device; return the model."""
        name = self._loading.pop(device)
        self._engines[device].add(name)
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

    def _model(self, name: str, *, is_late: bool = False) -> HostingModel:
        need_bytes = dict.fromkeys(self._numbers, self.costs.bytes_of(name))
        return HostingModel(
            name,
            need_bytes=need_bytes,
            is_late=is_late,
            home=self._homes.get(name),
            undivided=self._undivided[name],
        )

    def _device(
        self,
        number: int,
        on_device: Collection[str] = (),
        num_requests: int = 0,
        now_s: float = 0.0,
    ) -> HostingDevice:
        """Return a device for a decision; an engine that loads has its memory, and is busy."""
        loading = {self._loading[number]} if number in self._loading else set[str]()
        busy, names = loading.union(on_device), sorted(loading | self._engines[number])
        return HostingDevice(
            number,
            {name: self._engine(name, number, now_s, is_busy=name in busy) for name in names},
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
        )
