"""Baselines that serve whole requests: a device keeps a model until its requests are done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.policies.base import Choice, Placement, SimplePolicy, working
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Request, State

Rank = Callable[[Request], float]


def by_arrival(request: Request) -> float:
    return request.arrival_s


def by_output_length(request: Request) -> float:
    """Shortest job first, which takes an oracle; without one, in order of arrival."""
    return request.output_tokens if request.output_tokens is not None else request.arrival_s


class RequestLevelPolicy(SimplePolicy):
    """As ServerlessLLM: a device that is free takes the head of the queue, and with it its model.

    Requests of a model that is being served join it. ``max_live`` limits how many a device
    may have at a time; further ones wait, and may take another device. So do those for whose
    KV there is no room, and all of the model that come after them.
    """

    def __init__(self, name: str, rank: Rank = by_arrival, max_live: float = math.inf) -> None:
        self.name = name
        self._rank = rank
        self._max_live = max_live

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """From the head of the queue: to a device of the model that has room, or a free one."""
        free = [device for device in state.devices.values() if not device.num_requests]
        hosts: dict[str, list[DeviceState]] = {}
        serving: dict[str, list[DeviceState]] = {}
        for request in sorted(state.held.values(), key=self._rank):
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
        """A place for the next in the queue; devices without room are out for those after it."""
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
        """The one model whose requests it has."""
        batches = working(device)
        if not batches:
            return None
        return Choice(batches[0].model.name, math.inf, rule=Rule.UNTIL_DONE)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Unknown until the device is free."""
        return None
