"""Baselines that place each request once, at its arrival; turns are those of the default policy."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

from gpupoold.domain import Role
from gpupoold.scheduling.packing import Limits, load_norm, violated
from gpupoold.scheduling.policies.base import Placement
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, PlannedHome, Request, State


class PlacedOncePolicy(GpupoolPolicy):
    """Every device does both stages, and no request moves later."""

    name = "placed-once"

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Keep all roles."""
        return ()

    def homes(self, state: State, now_s: float) -> Mapping[str, PlannedHome | None]:
        """Plan no homes."""
        return {}

    def rebalance(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Keep all answers."""
        return ()

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place held requests."""
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                device, rule = self.choose(request, devices, state, now_s)
                yield Placement(request, device, rule)

    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        """Return one of the devices, and the rule."""
        raise NotImplementedError


class ShortestQueuePolicy(PlacedOncePolicy):
    """Join the shortest queue: the device with the fewest requests."""

    name = "shortest-queue"

    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        return _fewest(devices), Rule.FEWEST_REQUESTS


class PowerOfTwoPolicy(PlacedOncePolicy):
    """The device with fewer requests of two devices drawn by the request's name."""

    name = "power-of-two"

    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        if len(devices) == 1:
            return devices[0], Rule.ONLY_DEVICE
        rest, first = divmod(zlib.crc32(request.id.encode()), len(devices))
        second = (first + 1 + rest % (len(devices) - 1)) % len(devices)
        return _fewest([devices[first], devices[second]]), Rule.TWO_CHOICES


class BestFitPolicy(PlacedOncePolicy):
    """Aladdin's algorithm 1: the fullest device with the model that can take the request.

    If no device with the model can, the device with the fewest requests of the others.
    """

    name = "best-fit"

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__()
        self._limits = limits or Limits()

    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        name, limits = request.model.name, self._limits
        serving = [one for one in devices if name in one.models_with_requests]
        fullest_first = sorted(serving, key=lambda one: (-load_norm(one, limits), one.number))
        for device in fullest_first:
            if violated(device, request, state.lengths, now_s, limits) is None:
                return device, Rule.BEST_FIT
        others = [one for one in devices if one not in serving]
        return _fewest(others or devices), Rule.FEWEST_REQUESTS


def _fewest(devices: Iterable[DeviceState]) -> DeviceState:
    return min(devices, key=lambda one: (one.num_requests, one.number))
