"""Baseline: models fixed to devices by memory, all resident (multiplexing, as MuxServe)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from gpupoold.scheduling.policies.base import CannotServe, Placement, SimplePolicy
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Model, State

# A model is placed only with KV memory for this many requests of this many tokens.
_MIN_REQUESTS = 8
_TOKENS_PER_REQUEST = 2048


class StayingPolicy(GpupoolPolicy):
    """Base of policies in which roles and answers stay, with the turns of the default policy."""

    roles = SimplePolicy.roles
    homes = SimplePolicy.homes
    rebalance = SimplePolicy.rebalance


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
        if any(self._place.get(one.model.name) not in one.model.hosts for one in held):
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
    for model in sorted(state.models.values(), key=lambda one: (-_need_bytes(one), one.name)):
        number = max(model.hosts, key=lambda one: (room[one], -one), default=None)
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
