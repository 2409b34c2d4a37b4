"""Placement of a request: the device that serves its model, or one with the least load.

Used by the policy `gpupool` and by the estimates of waiting times.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpupoold.domain import Role
from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.policies.planned_turns import (
    LOAD_GRAIN,
    Loads,
    Tuning,
    load_of_batch,
    own_load,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Model, Request

# The rule behind each part of a rank.
_RANK_RULES = (Rule.LEAST_LOADED, Rule.HOME, Rule.RESIDENT, Rule.LEAST_LOADED, Rule.LEAST_LOADED)


def place(
    request: Request,
    devices: Sequence[DeviceState],
    loads: Loads,
    homes: dict[str, int],
    tuning: Tuning,
) -> tuple[DeviceState, Rule]:
    """Choose the planned home while the home keeps up, else as :func:`choose`, among helpers.

    Without a planned home, or if the home and its helpers are not among ``devices``, all devices
    are eligible.
    """
    planned = request.model.home
    if planned is None:
        return choose(request, devices, loads, homes, tuning)
    home = next((device for device in devices if device.number == planned.device), None)
    able = able_devices(request.model, devices)
    if home is None:
        return choose(request, able, loads, homes, tuning)
    if len(able) == 1 or (loads.of(home) <= tuning.full_load and admits(home, request)):
        return home, Rule.PLANNED_HOME
    return choose(request, able, loads, homes, tuning)


def able_devices(model: Model, devices: Sequence[DeviceState]) -> Sequence[DeviceState]:
    """Return the model's planned home and its helpers of ``devices``, all without any."""
    if model.home is None:
        return devices
    numbers = model.home.helpers | {model.home.device}
    return [device for device in devices if device.number in numbers] or devices


def choose(
    request: Request,
    devices: Sequence[DeviceState],
    loads: Loads,
    homes: dict[str, int],
    tuning: Tuning,
) -> tuple[DeviceState, Rule]:
    """Choose the device that serves the model; a full device yields to a less loaded device.

    A second device for a model costs a copy of the weights and a smaller batch on each device, so
    requests join the larger batch while its device keeps up, unless a device is free of other
    models. ``homes`` maps a model to the device chosen last when no device served the model, and is
    updated. At least one device is required. The result includes the deciding rule.
    """
    model, full_load = request.model, tuning.full_load
    serving = [device for device in devices if _has_work(model, device)]
    roomy = [one for one in serving if admits(one, request)]
    keeping_up = [one for one in roomy if loads.of(one) <= full_load]
    if serving:
        # A device of its own is worth a copy, above all if none keeps up.
        joined = min(serving, key=lambda one: (loads.of(one), one.number))
        if keeping_up:
            joined = max(keeping_up, key=lambda one: (_num_of(model, one), -one.number))
        free = _free_of_others(request, joined, devices, loads, tuning)
        if free is not None:
            return free, Rule.FREE_OF_OTHERS
        if keeping_up:
            return joined, Rule.SERVED_THERE
    if roomy and not any(_is_mostly(model, one, loads) for one in roomy):
        return min(roomy, key=lambda one: (loads.of(one), one.number)), Rule.SERVED_THERE
    home = homes.get(model.name)
    ranked = sorted(devices, key=lambda one: _rank(one, model, home, loads))
    admitting = next((one for one in ranked if admits(one, request)), None)
    chosen = admitting or min(ranked, key=lambda one: one.num_waiting_for_kv)
    if serving and not is_worth_a_copy(request, chosen, loads, tuning):
        return min(roomy or serving, key=lambda one: (loads.of(one), one.number)), Rule.NO_COPY
    rule = Rule.WAITS_FOR_KV if admitting is None else _rule_of(chosen, ranked, model, home, loads)
    homes[model.name] = chosen.number
    return chosen, rule


def _free_of_others(
    request: Request,
    joined: DeviceState,
    devices: Sequence[DeviceState],
    loads: Loads,
    tuning: Tuning,
) -> DeviceState | None:
    """Return a device without requests of other models that is better than ``joined``.

    Such a device takes requests from a device with some load if the model is resident, from a
    nearly full device also if the weights must be copied. Where roles are split, batches stay
    whole.
    """
    load, model = loads.of(joined), request.model
    if load <= tuning.spread_load or joined.role is not Role.MIXED:
        return None
    free = [
        device
        for device in devices
        if len(device.working) < 2  # almost always false on a busy box, and quick
        and device.models_with_requests <= {model.name}
        and (load > tuning.copy_load or not device.missing(model))
        and loads.of(device) < load
        and admits(device, request)
    ]
    ranked = sorted(free, key=lambda one: (one.missing(model) > 0, loads.of(one), one.number))
    return ranked[0] if ranked else None


def _rule_of(
    chosen: DeviceState, ranked: Sequence[DeviceState], model: Model, home: int | None, loads: Loads
) -> Rule:
    """Return the rule that ranks the chosen device before the next."""
    if chosen is not ranked[0]:
        return Rule.KV_ROOM
    if len(ranked) == 1:
        return Rule.ONLY_DEVICE
    first, second = (_rank(one, model, home, loads) for one in ranked[:2])
    pairs = zip(_RANK_RULES, first, second, strict=True)
    return next(rule for rule, one, other in pairs if one != other)


def is_worth_a_copy(request: Request, device: DeviceState, loads: Loads, tuning: Tuning) -> bool:
    """Return whether a model that another device serves may have ``device`` too."""
    load = loads.of(device) + own_load(request.model, device)
    return load <= tuning.second_device_load and admits(device, request)


def _has_work(model: Model, device: DeviceState) -> bool:
    name = model.name
    if name in device.working or name in device.queued or name in device.waiting_for_kv:
        return True
    moving = device.moving
    return bool(moving) and any(one.model is model for one in moving.values())


def _is_mostly(model: Model, device: DeviceState, loads: Loads) -> bool:
    """Return whether the model has at least half of the device's load.

    Moving other models away would not help then.
    """
    batch = device.working.get(model.name)
    if batch is None:  # all its requests may be migrating
        moving = device.moving.values()
        return bool(moving) and not device.working and all(one.model is model for one in moving)
    return load_of_batch(batch, device) >= 0.5 * loads.of(device)


def _num_of(model: Model, device: DeviceState) -> int:
    batches = device.working.get(model.name), device.queued.get(model.name)
    num_here = sum(len(batch.requests) for batch in batches if batch is not None)
    return num_here + sum(one.model is model for one in device.moving.values())


def _rank(
    device: DeviceState, model: Model, home: int | None, loads: Loads
) -> tuple[int, bool, bool, float, int]:
    load = loads.of(device)
    return (
        round(load / LOAD_GRAIN),
        device.number != home,
        device.missing(model) > 0,
        load,
        device.number,
    )
