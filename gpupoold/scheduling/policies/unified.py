"""Baselines that prefer one phase over the other on every device (Aegaeon, figure 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.policies.aegaeon import WeightedDecode
from gpupoold.scheduling.policies.base import (
    Choice,
    InLine,
    Placement,
    SimplePolicy,
    fewest_requests,
    waiting_for_kv,
    working,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Request, State


class _UnifiedPolicy(SimplePolicy):
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
        names = {one.model for one in first}
        return first + [one for one in self._decode.line(device) if one.model not in names]

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
        return [] if working(device) else device.queued_requests()


def _oldest_prompt(device: DeviceState, besides: str | None = None) -> Request | None:
    waiting = [
        request
        for batch in working(device)
        if batch.num_waiting and batch.model.name != besides
        for request in batch.requests.values()
        if request.phase is RequestPhase.SENT
    ]
    return min(waiting, key=lambda one: (one.arrival_s, one.id), default=None)
