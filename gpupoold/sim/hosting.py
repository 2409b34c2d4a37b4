"""Hosting in a simulated box: engines that take memory outside the pages, and loads that take time.

The decisions are those of the daemon (:mod:`gpupoold.scheduling.hosting`). A load does not stop the
turns of its device, as in the daemon. A model that takes over an engine of its family, perhaps one
in use, needs no load; its snapshot counts as always known.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupoold.domain import Role
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
    lacks_role,
    served_s,
    slack_of,
    slack_on,
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
    a load. All engines of a GPU have at most ``limit_bytes``, beside the libraries. ``own_bytes``
    has the models whose engines are of another size.
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
    is_bound: bool


class Hosting:
    """The engines on each device of a box.

    A device loads one engine at a time. ``num_loads`` counts the loads, without those before the
    first request, ``num_bound`` the engines that were taken over.
    """

    def __init__(
        self,
        costs: EngineCosts,
        models: Sequence[str],
        can_run: Sequence[Mapping[str, SimModel]],
        signs_s: Callable[[int, str], Iterable[float]] = lambda number, name: (),
    ) -> None:
        """Place the ``models`` in order, as far as the engines fit side by side.

        ``can_run`` has the models that each device can run, on that device. Models without a device
        are loaded when requests arrive. ``signs_s`` returns the times of the latest token, or else
        of the arrival, of each request of a model on a device. Raises UsageError if a device has
        too little memory for one engine.
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
        self._models, self._signs_s = tuple(models), signs_s
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
        held = defaultdict[str, list[float]](list)
        for request in state.held.values():
            held[request.model.name].append(request.next_deadline_s)
        slacks_s = {name: slack_of(held[name], now_s) for name in asked}
        asked.sort(key=slacks_s.__getitem__)
        devices = [self._device(number, state, now_s) for number in self._numbers]
        loads: list[EngineLoad] = []
        for name in asked:
            if len(self._loading) == len(self._engines):
                break
            if name in self._loading.values():
                continue
            # Only a device without work, or of another role, helps late requests.
            can_help = any(not (device.num_requests or device.num_loads) for device in devices)
            if not can_help and self._has_enough(name, devices):
                continue
            late = is_late(state, name, now_s)
            is_starving = self._is_starving(name, now_s)
            model = self._model(name, is_late=late, slack_s=slacks_s[name], is_starving=is_starving)
            chosen = choose(model, devices)
            if chosen and chosen[0].device not in self._loading:
                number = chosen[0].device
                loads.append(self._begin(model, devices[number], chosen[0].reason))
                devices[number] = self._device(number, state, now_s)
        return loads

    def _has_enough(self, name: str, devices: Sequence[HostingDevice]) -> bool:
        """Return whether a model has its home, or a device without one, and no device has room."""
        on = {number for number in self._numbers if name in self._engines[number]}
        num_bytes = self.costs.bytes_of(name)
        is_home = self._homes.get(name) in (None, *on)
        if lacks_role({devices[number].role for number in on}):
            return False
        return bool(on) and is_home and all(device.short_bytes(num_bytes) for device in devices)

    def _begin(
        self, model: HostingModel, device: HostingDevice, reason: HostingReason
    ) -> EngineLoad:
        name, gone = model.name, victims(model, device, reason)
        assert gone is not None, "the choice had checked it"
        self._engines[device.number] -= set(gone)
        self._loading[device.number] = name
        is_bound = is_taken_over(model, device, gone)
        self.num_bound += is_bound
        self.num_loads += not is_bound
        duration_s = BIND_S if is_bound else self.costs.load_s
        return EngineLoad(device.number, name, tuple(gone), duration_s, is_bound)

    def hostable(self, state: State, now_s: float) -> list[Hostable]:
        """Return the changes of the devices that could run models, as often as the daemon does."""
        if now_s < self._next_hostable_s:
            return []
        self._next_hostable_s = now_s + HOSTABLE_PERIOD_S
        devices = [idle(self._device(number, state, now_s)) for number in self._numbers]
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
            model = self._model(name)
            for choice in choose(model, devices):
                device = devices[choice.device]
                gone = victims(replace(model, layouts=None), device, choice.reason)
                if gone is not None and not any(device.engines[name].is_only for name in gone):
                    self._engines[choice.device] -= set(gone)
                    self._engines[choice.device].add(name)

    def _is_starving(self, name: str, now_s: float) -> bool:
        """Return whether a model with requests has waited longest, and long, for an engine."""
        if not self._num_live[name] or any(name in on for on in self._engines):
            self._waits.end(name)
            return False
        family_of, live = self._family, self._num_live
        return self._waits.is_starving(
            name, now_s, lambda other: family_of(other) == family_of(name) and live[other] > 0
        )

    def _family(self, name: str) -> str:
        return next(iter(self._layouts[name].values()), "")

    def _model(
        self,
        name: str,
        *,
        is_late: bool = False,
        slack_s: float = math.inf,
        is_starving: bool = False,
    ) -> HostingModel:
        need_bytes = dict.fromkeys(self._numbers, self.costs.bytes_of(name))
        return HostingModel(
            name,
            need_bytes=need_bytes,
            is_late=is_late,
            home=self._homes.get(name),
            undivided=self._undivided[name],
            layouts=self._layouts[name],
            family=self._family(name),
            slack_s=slack_s,
            is_starving=is_starving,
        )

    def _device(self, number: int, state: State | None = None, now_s: float = 0.0) -> HostingDevice:
        """Return a device for a decision; an engine that loads has its memory, and is busy.

        No other model shares an engine that loads, or to which requests are on the way.
        """
        known = None if state is None else state.devices[number]
        loading = {self._loading[number]} if number in self._loading else set[str]()
        on_device = known.models_with_requests if known else set[str]()
        busy, names = loading | on_device, sorted(loading | self._engines[number])
        engines = {name: self._engine(name, number, now_s, is_busy=name in busy) for name in names}
        for name in on_device & self._engines[number]:
            if known is not None and engines[name].family:
                since_s = self._since_s.get((number, name), 0.0)
                engines[name] = replace(
                    engines[name],
                    slack_s=slack_on(known, name, now_s),
                    served_s=served_s(since_s, self._signs_s(number, name), now_s),
                )
        num_requests = known.num_requests if known else 0
        role = known.role if known else Role.MIXED
        return HostingDevice(
            number, engines, self.costs.limit_bytes, num_requests, len(loading), role=role
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
        )
