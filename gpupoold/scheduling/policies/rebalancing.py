"""Migration of running answers off a device with more load than predicted.

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

from collections.abc import Iterable

from gpupoold.domain import Role
from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.policies.placement import able_devices
from gpupoold.scheduling.policies.planned_turns import Loads, Tuning, more_load
from gpupoold.scheduling.state import DeviceState, Model, Request, State

# Longest pause of a migration, as a share of the answer's remaining time at its target.
_PAUSE_SHARE = 0.1
_LEAST_STAY_S = 30.0
# Most migrations per device and tick: the next tick reads the loads again.
_MAX_MOVES = 8


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
            (_tokens_left(one, state), one)
            for name, batch in source.working.items()
            if targets[name]
            for one in batch.requests.values()
            if one.phase is RequestPhase.DECODING
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
        """Return the least loaded device with enough free load and memory."""
        limit = self._tuning.second_device_load
        fitting = [
            device
            for device in devices
            if loads.of(device) + more_load(request, device) <= limit and admits(device, request)
        ]
        return min(fitting, key=lambda one: (loads.of(one), one.number), default=None)


def _tokens_left(request: Request, state: State) -> float:
    name, has = request.model.name, request.num_tokens
    return state.lengths.predict_again(name, request.prompt_tokens, has) - has
