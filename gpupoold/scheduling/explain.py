"""Reasons why a request waits. Reads the state and changes nothing.

The rules are recorded at the time of the decision (:mod:`.rules`), and the queue of a device comes
from the policy. The times are estimates of :mod:`.wait_estimate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gpupoold.domain import Turns, WaitingTurn
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Request, State
from gpupoold.scheduling.wait_estimate import next_token_in_s


class Standing(StrEnum):
    """The place of a live request: the reason to wait, or the stage."""

    NO_DEVICE = "no-device"
    HELD = "held"
    KV_ROOM = "kv-room"
    WAITS_FOR_TURN = "waits-for-turn"
    BEHIND_PROMPTS = "behind-prompts"
    PREFILLING = "prefilling"
    PAUSED = "paused"
    ON_TURN = "on-turn"
    MOVING = "moving"


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """The place of a request, the rule that chose the device, and the time to the next token.

    The time is None if unknown. ``num_before`` requests are ahead in the queue for KV memory.
    """

    standing: Standing
    device: int | None
    rule: Rule | None
    next_token_in_s: float | None
    num_before: int = 0


def turns_of(policy: Policy, state: State, device: DeviceState, now_s: float) -> Turns:
    """Return the present turn on a device and the queue."""
    turn = device.turn
    used_s = max(now_s - device.turn_began_s, 0.0) if turn else 0.0
    has_end = turn is not None and device.then is not None and math.isfinite(turn.quota_s)
    left_s = max(turn.quota_s - used_s, 0.0) if turn is not None and has_end else None
    line: list[WaitingTurn] = []
    at_s = left_s if turn is not None else 0.0
    for one in policy.line(device, state, now_s):
        num = _num_requests(device, one.model)
        line.append(WaitingTurn(one.model, one.rule.value, one.rule.why, at_s, one.duration_s, num))
        at_s = None if at_s is None or one.duration_s is None else at_s + one.duration_s
    rule = device.turn_rule if turn else None
    name, why = (rule.value, rule.why) if rule else (None, None)
    return Turns(device.number, turn.model if turn else None, name, why, used_s, left_s, line)


def why_request(state: State, request: Request, now_s: float) -> RequestExplanation:
    """Return the explanation of a live request of the state."""
    standing = standing_of(state, request)
    if standing is Standing.NO_DEVICE:
        return RequestExplanation(standing, None, None, None)
    in_s = next_token_in_s(state, request, now_s)
    num_before = 0
    if standing is Standing.KV_ROOM and request.device is not None:
        device = state.devices[request.device]
        others = [one for line in device.waiting_for_kv.values() for one in line.requests.values()]
        num_before = sum(other.arrival_s < request.arrival_s for other in others)
    return RequestExplanation(standing, request.device, request.rule, in_s, num_before)


def standing_of(state: State, request: Request) -> Standing:
    """Return the place of a request."""
    if request.phase is RequestPhase.HELD or request.device is None:
        return Standing.HELD if request.model.hosts else Standing.NO_DEVICE
    if request.phase is RequestPhase.MOVING:
        return Standing.MOVING
    device = state.devices[request.device]
    if device.is_waiting_for_kv(request):
        return Standing.KV_ROOM
    is_on_turn = device.turn is not None and device.turn.model == request.model.name
    if request.phase is RequestPhase.DECODING:
        return Standing.ON_TURN if is_on_turn else Standing.PAUSED
    if not is_on_turn:
        return Standing.WAITS_FOR_TURN
    is_sent = request.phase is RequestPhase.SENT
    return Standing.PREFILLING if is_sent else Standing.BEHIND_PROMPTS


def _num_requests(device: DeviceState, model: str) -> int:
    batches = device.working.get(model), device.queued.get(model)
    return sum(len(batch.requests) for batch in batches if batch is not None)
