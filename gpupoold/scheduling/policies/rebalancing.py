"""Homes of models, and migration of running answers off a device with more load than predicted.

Answers are placed at their first token by predicted lengths. After wrong predictions a device may
be full beside an idle device. Aladdin (appendix D) then sends new requests elsewhere, as
``first_token`` does, which uses the devices' real load. The remaining remedy is to migrate running
answers.

A migration costs a copy of the answer's KV out and in, during which the answer pauses. A migration
is worth the cost if

- the device is full, and the other device stays below the limit for a second device of a model,
  with a load lower by that gap: so no answer returns while loads stay the same;
- the pause is a small part of the answer's remaining time, by the lengths of answers that got as
  long (a new prediction, because the first one was wrong);
- the migration does not make the next token late, or the token is late anyway;
- the answer has not been migrated for half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gpupoold.domain import Role
from gpupoold.scheduling.admission import admits
from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.policies.placement import able_devices
from gpupoold.scheduling.policies.planned_turns import Loads, Tuning, more_load
from gpupoold.scheduling.pressure import (
    HomeDevice,
    ModelDemand,
    better_homes,
    homes_pay,
    switching_shares,
)
from gpupoold.scheduling.state import (
    DeviceState,
    Model,
    PlannedHome,
    Request,
    RequestPhase,
    Speed,
    State,
)

# Longest pause of a migration, as a share of the answer's remaining time at its target.
_PAUSE_SHARE = 0.1
_LEAST_STAY_S = 30.0
# Most migrations per device and tick: the next tick reads the loads again.
_MAX_MOVES = 8

_PERIOD_S = 5.0
# Less is no reason to move a model: rates are estimates, and a move costs a copy.
_THRESHOLD = 0.1
# A home that must load the engine is planned from the arrivals of at least so long.
_LEAST_SEEN_S = 30.0
# The share of a device's time for switches to and from a model whose home is elsewhere.
_HELPER_SWITCHING = 0.15


class Rebalancer:
    """Chooses migrations, and records each, so that no answer migrates back and forth."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._moved_s: dict[str, float] = {}

    def ended(self, request: Request) -> None:
        self._moved_s.pop(request.id, None)

    def migrations(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Return migrations that improve the balance."""
        devices = [device for device in state.devices.values() if not device.migrates_out]
        if len(devices) < 2:
            return
        loads = Loads()
        limit = self._tuning.second_device_load
        if all(loads.of(device) > limit for device in devices):
            return
        for source in devices:
            # A model alone on a device has a second device by placement, without copies of KV.
            may_give = source.role is Role.DECODE or len(source.working) > 1
            if may_give and loads.of(source) > self._tuning.full_load:
                yield from self._off(source, devices, state, loads, now_s)

    def _off(
        self,
        source: DeviceState,
        devices: list[DeviceState],
        state: State,
        loads: Loads,
        now_s: float,
    ) -> Iterable[tuple[Request, DeviceState]]:
        """Yield answers to migrate off a device, longest remainder first, while it is full."""
        targets = {
            name: self._targets(batch.model, source, devices, loads)
            for name, batch in source.working.items()
        }
        answers = [
            (_tokens_left(request, state), request)
            for name, batch in source.working.items()
            if targets[name]
            for request in batch.requests.values()
            if request.phase is RequestPhase.DECODING
        ]
        answers.sort(key=lambda answer: (-answer[0], answer[1].id))
        num_migrated = 0
        for tokens_left, request in answers:
            if loads.of(source) <= self._tuning.full_load or num_migrated == _MAX_MOVES:
                return
            if not self._is_worth_it(request, tokens_left, source, now_s):
                continue
            target = self._target(request, targets[request.model.name], loads)
            if target is not None:
                less, more = more_load(request, source), more_load(request, target)
                loads.move(less, more, source, target)
                self._moved_s[request.id] = now_s
                num_migrated += 1
                yield request, target

    def _is_worth_it(
        self, request: Request, tokens_left: float, source: DeviceState, now_s: float
    ) -> bool:
        moved_s = self._moved_s.get(request.id)
        if moved_s is not None and now_s - moved_s < _LEAST_STAY_S:
            return False
        kv_bytes = request.context_tokens * request.model.kv_bytes_per_token
        pause_s = 2 * kv_bytes / source.bandwidth_bytes_per_s
        if pause_s > _PAUSE_SHARE * tokens_left * request.model.targets.tbt_s:
            return False
        due_in_s = request.next_deadline_s - now_s
        return due_in_s < 0 or due_in_s >= pause_s

    def _targets(
        self, model: Model, source: DeviceState, devices: list[DeviceState], loads: Loads
    ) -> list[DeviceState]:
        """Return the other devices with free load and the model working or resident.

        A model with a planned home stays on the home and its helpers.
        """
        return [
            device
            for device in able_devices(model, devices)
            if device is not source
            and loads.of(device) <= self._tuning.second_device_load
            and device.number in model.hosts
            and (model.name in device.working or not device.missing(model))
        ]

    def _target(
        self, request: Request, devices: list[DeviceState], loads: Loads
    ) -> DeviceState | None:
        limit = self._tuning.second_device_load
        fitting = [
            device
            for device in devices
            if loads.of(device) + more_load(request, device) <= limit and admits(device, request)
        ]
        return min(fitting, key=lambda device: (loads.of(device), device.number), default=None)


def _tokens_left(request: Request, state: State) -> float:
    name, has = request.model.name, request.num_tokens
    return state.lengths.predict_again(name, request.prompt_tokens, has) - has


class HomePlanner:
    """Plans homes for models where homes pay, or if not all devices host all models.

    Where homes do not pay, a request is best placed by the loads of the moment, and homes only
    decide where engines are loaded (:mod:`gpupoold.scheduling.hosting`).
    """

    def __init__(self, lead_share: float) -> None:
        self._lead_share = lead_share
        self._next_s = -math.inf
        self._homes: dict[str, int] = {}

    def changes(self, state: State, now_s: float) -> dict[str, PlannedHome | None]:
        """Return the homes that have changed, if it is time to plan again.

        Models without arrivals have no home; neither have any if roles are split.
        """
        if now_s < self._next_s:
            return {}
        self._next_s = now_s + _PERIOD_S
        devices = [] if state.is_split else _devices(state, now_s, self._lead_share)
        pay = any(map(homes_pay, devices))
        if pay or any(model.hostable for model in state.models.values()):
            self._homes = better_homes(self._homes, devices, _THRESHOLD)
        else:
            self._homes = {}
        helpers = self._helpers(devices) if pay else {}
        planned = {
            name: PlannedHome(number, helpers.get(name)) for name, number in self._homes.items()
        }
        changed = {name: home for name, home in planned.items() if state.models[name].home != home}
        gone = [name for name, model in state.models.items() if model.home and name not in planned]
        return changed | dict.fromkeys(gone)

    def _helpers(self, devices: Sequence[HomeDevice]) -> dict[str, frozenset[int]]:
        """Return the devices where switches to each model would take little time.

        Such switches make no answers of other models late either.
        """
        helpers: dict[str, set[int]] = {name: set() for name in self._homes}
        for device in devices:
            here = [name for name, number in self._homes.items() if number == device.number]
            for name, share in switching_shares(device, here).items():
                if name in helpers and share <= _HELPER_SWITCHING:
                    helpers[name].add(device.number)
        return {name: frozenset(numbers) for name, numbers in helpers.items()}


def _devices(state: State, now_s: float, lead_share: float) -> list[HomeDevice]:
    """Return the devices in service with the expected work of the models that may live there.

    Those are the hosts of a model, and devices that could load its engine once arrivals are known
    for longer than a load takes. Models without arrivals have no work.
    """
    models, lasting = state.models, state.arrivals.lasting
    rates = {name: rate for name, rate in lasting.rates_rps(now_s).items() if name in models}
    may_load = lasting.seen_s(now_s) >= _LEAST_SEEN_S
    devices = [device for device in state.devices.values() if not device.is_draining]
    by_kind = {
        kind: {
            name: expected_work(models[name], by_class, models[name].speed(kind), lead_share)
            for name, by_class in rates.items()
        }
        for kind in {device.up.kind for device in devices}
    }
    return [
        HomeDevice(
            device.number,
            device.up.capacity_bytes,
            device.bandwidth_bytes_per_s,
            {
                name: demand
                for name, demand in by_kind[device.up.kind].items()
                if name in device.batches or (may_load and device.number in models[name].hostable)
            },
            device.far,
            device.up.far_share,
        )
        for device in devices
    ]


def expected_work(
    model: Model, rates_rps: Mapping[RequestClass, float], speed: Speed, lead_share: float
) -> ModelDemand:
    """Return the expected work of a model on a device of a kind.

    Answers are paced by the TBT target, so the number of live requests is the arrival rate
    times the target's time for an answer (Little's law), and the model is without requests as
    often as an M/G/infinity queue is empty.
    """
    targets = model.targets
    num_live = tokens = prefill_s = 0.0
    for kind, rate_rps in rates_rps.items():
        num = rate_rps * kind.num_output_tokens * targets.tbt_s
        num_live += num
        tokens += num * (kind.num_prompt_tokens + kind.num_output_tokens / 2)
        prefill_s += rate_rps * speed.costs.prefill_s(kind.num_prompt_tokens)
    busy_share = -math.expm1(-num_live)
    num_if_busy = max(1.0, num_live / busy_share) if busy_share else 1.0
    context_tokens = tokens / num_live * num_if_busy if num_live else 0.0
    step_s = speed.step_s(round(num_if_busy), round(context_tokens))
    decode = busy_share * step_s / targets.tbt_s if model.generates else 0.0
    return ModelDemand(
        model.name,
        decode + prefill_s,
        busy_share,
        lead_share * targets.ttft_s,
        model.weight_bytes,
        tokens * model.kv_bytes_per_token,
    )
