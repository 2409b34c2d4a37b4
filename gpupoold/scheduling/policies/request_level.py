"""Baselines that serve whole requests: a device keeps a model until its requests are done."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.policies.base import Choice, Placement, SimplePolicy, working
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Request, State


class RequestLevelPolicy(SimplePolicy):
    """Like ServerlessLLM: a free device takes the head of the queue and runs its model.

    Requests of a running model join the model. ``max_live`` limits the requests of a device;
    further requests wait, and may take another device. The same holds for a request without KV
    memory, and for all later requests of the model.
    """

    def __init__(self, name: str = "request-level", max_live: float = math.inf) -> None:
        self.name = name
        self._max_live = max_live

    def rank(self, request: Request) -> float:
        """Return the request's place in the queue; the lowest is the head."""
        return request.arrival_s

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place requests from the head of the queue: on a device of the model, or a free device."""
        free = [device for device in state.devices.values() if not device.num_requests]
        hosts: dict[str, list[DeviceState]] = {}
        serving: dict[str, list[DeviceState]] = {}
        for request in sorted(state.held.values(), key=self.rank):
            name = request.model.name
            if name not in hosts:
                hosts[name] = state.prefill_hosts(request.model)
                serving[name] = [
                    one for one in hosts[name] if name in one.working or name in one.queued
                ]
            candidates = [device for device in free if device in hosts[name]]
            place = self._choose(request, serving[name], candidates)
            rule = Rule.SERVED_THERE
            if place in free:
                free.remove(place)
                rule = Rule.FREE_DEVICE
            if place is not None:
                yield Placement(request, place, rule)

    def _choose(
        self, request: Request, serving: list[DeviceState], candidates: list[DeviceState]
    ) -> DeviceState | None:
        """Choose a device for the next request; full devices are excluded for later requests."""
        while serving:
            if serving[0].num_requests < self._max_live and admits(serving[0], request):
                return serving[0]
            del serving[0]
        if not candidates:
            return None
        device = min(candidates, key=lambda one: (one.missing(request.model) > 0, one.number))
        serving.append(device)
        return device

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the model whose requests the device has."""
        batches = working(device)
        if not batches:
            return None
        return Choice(batches[0].model.name, math.inf, rule=Rule.UNTIL_DONE)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return None: the next model is unknown until the device is free."""
        return None
