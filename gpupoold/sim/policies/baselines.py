"""Baselines that the daemon does not offer.

``PlacedOncePolicy`` and its subclasses place each request once, at its arrival; turns are those of
the default policy.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from gpupoold.scheduling.policies.base import Placement, fewest_requests
from gpupoold.scheduling.policies.request_level import RequestLevelPolicy
from gpupoold.scheduling.policies.static import StayingPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Request, State
from gpupoold.sim.policies.packing import Limits, load_norm, violated


class ShortestJobPolicy(RequestLevelPolicy):
    """Serve whole requests, the shortest answer first."""

    def __init__(self) -> None:
        super().__init__("request-level-sjf")

    def rank(self, request: Request) -> float:
        """Return the output length, or the arrival if the length is unknown."""
        return super().rank(request) if request.output_tokens is None else request.output_tokens


class PlacedOncePolicy(StayingPolicy, ABC):
    """Every device does both stages, and no request moves later."""

    name = "placed-once"

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place held requests."""
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                device, rule = self.choose(request, devices, state, now_s)
                yield Placement(request, device, rule)

    @abstractmethod
    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        """Return one of the devices, and the rule."""


class ShortestQueuePolicy(PlacedOncePolicy):
    """Join the shortest queue: the device with the fewest requests."""

    name = "shortest-queue"

    def choose(
        self, request: Request, devices: Sequence[DeviceState], state: State, now_s: float
    ) -> tuple[DeviceState, Rule]:
        return fewest_requests(devices), Rule.FEWEST_REQUESTS


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
        return fewest_requests([devices[first], devices[second]]), Rule.TWO_CHOICES


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
        return fewest_requests(others or devices), Rule.FEWEST_REQUESTS
