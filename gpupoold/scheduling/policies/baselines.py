"""Baselines of papers: one phase first, models fixed to devices, and whole requests."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace

from gpupoold.scheduling.admission import admits
from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.policies.aegaeon import WeightedDecode
from gpupoold.scheduling.policies.base import (
    CannotServe,
    Choice,
    InLine,
    Placement,
    Policy,
    fewest_requests,
    waiting_for_kv,
)
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Model, Request, RequestPhase, State

# A model is placed only with KV memory for this many requests of this many tokens.
_MIN_REQUESTS = 8
_TOKENS_PER_REQUEST = 2048


class _UnifiedPolicy(Policy):
    """Requests go to the device with the fewest requests; turns follow equations 2 and 3."""

    name = "unified"

    def __init__(self) -> None:
        self._decode = WeightedDecode()

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place held requests on devices, and requests waiting for KV on devices with memory."""
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                yield Placement(request, fewest_requests(devices), Rule.FEWEST_REQUESTS)
        for request, devices in waiting_for_kv(state):
            target = fewest_requests(devices)
            if admits(target, request):
                yield Placement(request, target, Rule.MIGRATED_FOR_KV)

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the next batch of the round."""
        return self._decode.next_turn(device)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        return self._decode.upcoming(device)

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Return the rest of the round."""
        return self._decode.line(device)


class PrefillFirstPolicy(_UnifiedPolicy):
    """A prompt interrupts any decoding; slow under bursts of prompts."""

    name = "prefill-first"

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the model of the oldest waiting prompt; without prompts, the decode round."""
        oldest = _oldest_prompt(device)
        if oldest is not None:
            return Choice(oldest.model.name, 0.0, rule=Rule.PREFILL_FIRST)
        return self._decode.next_turn(device)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return the model of the next prompt, or of the next batch."""
        oldest = _oldest_prompt(device, besides=device.turn.model if device.turn else None)
        return oldest.model.name if oldest is not None else self._decode.upcoming(device)

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Return the oldest prompt's model, then the rest of the round."""
        oldest = _oldest_prompt(device, besides=device.turn.model if device.turn else None)
        first = [] if oldest is None else [InLine(oldest.model.name, Rule.PREFILL_FIRST)]
        names = {request.model for request in first}
        return first + [
            request for request in self._decode.line(device) if request.model not in names
        ]

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """End decoding while a prompt of another model waits."""
        if _oldest_prompt(device, besides=turn.model) is None:
            return turn
        return replace(turn, quota_s=0.0)


class DecodeFirstPolicy(_UnifiedPolicy):
    """Running answers end before new prompts are taken; slow with long answers."""

    name = "decode-first"

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        """Return no request while an answer is running, else all queued requests."""
        return [] if device.working else device.queued_requests()


def _oldest_prompt(device: DeviceState, besides: str | None = None) -> Request | None:
    waiting = [
        request
        for batch in device.working.values()
        if batch.num_waiting and batch.model.name != besides
        for request in batch.requests.values()
        if request.phase is RequestPhase.SENT
    ]
    return min(waiting, key=lambda request: (request.arrival_s, request.id), default=None)


class StayingPolicy(GpupoolPolicy):
    """Base of policies in which roles and answers stay, with the turns of the default policy."""

    roles = Policy.roles
    homes = Policy.homes
    rebalance = Policy.rebalance


class StaticPolicy(StayingPolicy):
    """No device ever switches; turns of resident models follow the default policy."""

    name = "static"

    def __init__(self) -> None:
        super().__init__()
        self._place: dict[str, int] = {}

    def check(self, state: State) -> None:
        """Raise :class:`CannotServe` if a model fits on no device beside the other models."""
        _placed(state)

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place each request on its model's device; requests of unplaced models stay held."""
        held = list(state.held.values())
        if any(self._place.get(request.model.name) not in request.model.hosts for request in held):
            with contextlib.suppress(CannotServe):  # the shell called check() before
                self._place = _placed(state)
        for request in held:
            number = self._place.get(request.model.name)
            if number in request.model.hosts:
                yield Placement(request, state.devices[number], Rule.FIXED_PLACE)


def _placed(state: State) -> dict[str, int]:
    """Return each model's device: heaviest models first, on the device with most free memory."""
    room = {number: device.up.capacity_bytes for number, device in state.devices.items()}
    places: dict[str, int] = {}
    for model in sorted(state.models.values(), key=lambda model: (-_need_bytes(model), model.name)):
        number = max(model.hosts, key=lambda host: (room[host], -host), default=None)
        if number is None or room[number] < _need_bytes(model):
            raise CannotServe(
                f"only {len(places)} of {len(state.models)} models fit the devices at once: no "
                f"device has {_need_bytes(model) / 1e9:.3g} GB free for {model.name}"
            )
        places[model.name] = number
        room[number] -= _need_bytes(model)
    return places


def _need_bytes(model: Model) -> int:
    return model.weight_bytes + _MIN_REQUESTS * _TOKENS_PER_REQUEST * model.kv_bytes_per_token


class RequestLevelPolicy(Policy):
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
                    device
                    for device in hosts[name]
                    if name in device.working or name in device.queued
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
        device = min(
            candidates,
            key=lambda candidate: (candidate.missing(request.model) > 0, candidate.number),
        )
        serving.append(device)
        return device

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the model whose requests the device has."""
        name = next(iter(device.working), None)
        return None if name is None else Choice(name, math.inf, rule=Rule.UNTIL_DONE)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return None: the next model is unknown until the device is free."""
        return None
