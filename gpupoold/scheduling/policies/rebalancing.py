"""Moving answers in progress off a decode device that has more to do than was predicted.

Answers go to devices when they have their first token, by lengths that were predicted. Where
the predictions were wrong, one device ends up full beside an idle one. Aladdin (appendix D)
then sends new requests elsewhere; so does ``first_token``, since it goes by what devices have.
What is left are the answers that run already, which can be handed over.

That costs a copy of the answer's KV out and in, during which it pauses. It is worth that if

- the device is full, and stays under what a second device for a model may have to do on the
  other, whose load is lower by that gap: so no answer comes back while loads stay as they are;
- the pause is a small part of what the answer still takes, by the lengths of those that got
  as long (the prediction is made anew, as the first was wrong or it would have ended);
- its next token is not late for it, or is late anyway;
- it has not been moved for half a minute.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpupoold.domain import Role
from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.policies.planned_turns import Loads, Tuning, more_load
from gpupoold.scheduling.state import DeviceState, Request, State

# The pause of a move may be so much of the time that an answer still takes at its target.
_PAUSE_SHARE = 0.1
_LEAST_STAY_S = 30.0
# Per device and tick: loads are looked at again before the next.
_MAX_MOVES = 8


class Rebalancer:
    """Remembers who was moved, so that nobody goes to and fro."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._moved_s: dict[str, float] = {}

    def ended(self, request: Request) -> None:
        self._moved_s.pop(request.id, None)

    def migrations(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        """Answers that go on better elsewhere."""
        devices = [one for one in state.devices.values() if not one.gives_away]
        full = [one for one in devices if one.role is Role.DECODE and len(devices) > 1]
        loads = Loads()
        for source in full:
            if loads.of(source) > self._tuning.full_load:
                yield from self._off(source, devices, state, loads, now_s)

    def _off(
        self,
        source: DeviceState,
        devices: list[DeviceState],
        state: State,
        loads: Loads,
        now_s: float,
    ) -> Iterable[tuple[Request, DeviceState]]:
        """Of one device: those with the most to come first, until it is full no more."""
        answers = [
            (_tokens_left(one, state), one)
            for batch in source.working.values()
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
            target = self._target(request, source, devices, loads)
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

    def _target(
        self, request: Request, source: DeviceState, devices: list[DeviceState], loads: Loads
    ) -> DeviceState | None:
        """The least loaded device that has the model at work or resident, and room for it."""
        model, limit = request.model, self._tuning.second_device_load
        fitting = [
            one
            for one in devices
            if one is not source
            and one.number in model.hosts
            and (model.name in one.working or not one.missing(model))
            and loads.of(one) + more_load(request, one) <= limit
            and admits(one, request)
        ]
        return min(fitting, key=lambda one: (loads.of(one), one.number), default=None)


def _tokens_left(request: Request, state: State) -> float:
    name, has = request.model.name, request.num_tokens
    return state.lengths.predict_again(name, request.prompt_tokens, has) - has
