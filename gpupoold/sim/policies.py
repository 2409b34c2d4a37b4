"""Policies by the names that users of the simulator write: the daemon's, and further baselines.

``PlacedOncePolicy`` places each request once, at its arrival; turns are those of the default
policy.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpupoold.errors import UsageError
from gpupoold.scheduling.policies import named
from gpupoold.scheduling.policies.base import Placement, Policy, fewest_requests
from gpupoold.scheduling.policies.baselines import RequestLevelPolicy, StayingPolicy
from gpupoold.scheduling.policies.named import PolicyOptions
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, RequestPhase, State

__all__ = ["POLICY_NAMES", "PolicyOptions", "make_policy"]

# Share of the answers at which steps must still be on time.
_GAMMA = 0.5


class ShortestJobPolicy(RequestLevelPolicy):
    """Serve whole requests, the shortest answer first."""

    def __init__(self) -> None:
        super().__init__(_SHORTEST_JOB)

    def rank(self, request: Request) -> float:
        """Return the output length, or the arrival if the length is unknown."""
        return super().rank(request) if request.output_tokens is None else request.output_tokens


Choose = Callable[[Request, Sequence[DeviceState], float], tuple[DeviceState, Rule]]


class PlacedOncePolicy(StayingPolicy):
    """Every device does both stages, and no request moves later.

    ``choose`` returns one of the devices for a request that has arrived, and the deciding rule.
    """

    def __init__(self, name: str, choose: Choose) -> None:
        super().__init__()
        self.name, self._choose = name, choose

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place held requests."""
        for request in list(state.held.values()):
            if devices := state.prefill_hosts(request.model):
                yield Placement(request, *self._choose(request, devices, now_s))


def shortest_queue(
    request: Request, devices: Sequence[DeviceState], now_s: float
) -> tuple[DeviceState, Rule]:
    """Return the device with the fewest requests."""
    return fewest_requests(devices), Rule.FEWEST_REQUESTS


def power_of_two(
    request: Request, devices: Sequence[DeviceState], now_s: float
) -> tuple[DeviceState, Rule]:
    """Return the device with fewer requests of two devices drawn by the request's name."""
    if len(devices) == 1:
        return devices[0], Rule.ONLY_DEVICE
    rest, first = divmod(zlib.crc32(request.id.encode()), len(devices))
    second = (first + 1 + rest % (len(devices) - 1)) % len(devices)
    return fewest_requests([devices[first], devices[second]]), Rule.TWO_CHOICES


def best_fit(
    request: Request, devices: Sequence[DeviceState], now_s: float
) -> tuple[DeviceState, Rule]:
    """Return the fullest device with the model that can take the request (Aladdin's algorithm 1).

    If no device with the model can, the device with the fewest requests of the others.
    """
    name = request.model.name
    serving = [device for device in devices if name in device.models_with_requests]
    for device in sorted(serving, key=lambda device: (-load_norm(device), device.number)):
        if fits(device, request, now_s):
            return device, Rule.BEST_FIT
    others = [device for device in devices if device not in serving]
    return fewest_requests(others or devices), Rule.FEWEST_REQUESTS


class ModelTotals(NamedTuple):
    """Sums over the requests of a model on a device, queued requests included."""

    model: Model
    num_requests: int
    prompt_tokens: int
    answer_tokens: float


def totals_of(device: DeviceState, newcomer: Request | None = None) -> list[ModelTotals]:
    """Return the sums of each model with requests, as if ``newcomer`` were there too."""
    sums: dict[str, ModelTotals] = {}

    def add(model: Model, num: int, prompt_tokens: int, answer_tokens: float) -> None:
        known = sums.get(model.name, ModelTotals(model, 0, 0, 0.0))
        sums[model.name] = ModelTotals(
            model,
            known.num_requests + num,
            known.prompt_tokens + prompt_tokens,
            known.answer_tokens + answer_tokens,
        )

    for batch in _batches(device):
        add(batch.model, len(batch.requests), batch.prompt_tokens, batch.expected_tokens)
    for one in (*device.moving.values(), *((newcomer,) if newcomer else ())):
        add(one.model, 1, one.prompt_tokens, one.expected_tokens)
    return list(sums.values())


def fits(device: DeviceState, request: Request, now_s: float) -> bool:
    """Return whether a device has the capacities for one more request.

    The letters are those of the program in Aladdin, section 4.2. Aladdin's workers serve one model;
    here a device's models share its time and memory.
    """
    totals = totals_of(device, request)
    if _step_share(device, totals) > 1:  # (b) context and batch size make steps too slow
        return False
    prefill_s = device.speed(request.model).costs.prefill_s(request.context_tokens)
    if request.model.name not in device.working:
        prefill_s += device.switch_s(request.model)
    waiting_s = sum(batch.prefill_s() for batch in _batches(device))
    if waiting_s + prefill_s > request.next_deadline_s - now_s:
        return False  # (c) prefills placed together take too long
    if prefill_s > _least_lead_s(device, now_s):
        return False  # (d) running answers would fall behind during the prefill
    weight_bytes = max(total.model.weight_bytes for total in totals)
    room_bytes = device.up.capacity_bytes + (device.up.kv_host_bytes or 0) - weight_bytes
    requests = [request for batch in _batches(device) for request in batch.requests.values()]
    # (e) at some later time the KV of all does not fit
    return peak_kv_bytes([*requests, *device.moving.values(), request]) <= room_bytes


def load_norm(device: DeviceState) -> float:
    """Return the fill for ordering devices: the L2 norm of batch size and weighted context."""
    totals = totals_of(device)
    context_tokens = sum(total.prompt_tokens + _GAMMA * total.answer_tokens for total in totals)
    return math.hypot(sum(total.num_requests for total in totals), context_tokens)


def peak_kv_bytes(requests: Iterable[Request]) -> float:
    """Return the peak KV of the requests up to the expected lengths; O(n log n).

    Each answer grows by a token per TBT and frees its KV at its end, so the peak is at some end.
    """
    longest_first = sorted(map(_growth, requests), reverse=True)
    peak_bytes = held_bytes = bytes_per_s = 0.0
    for left_s, kv_bytes, growth in longest_first:
        held_bytes += kv_bytes
        bytes_per_s += growth
        peak_bytes = max(peak_bytes, held_bytes + bytes_per_s * left_s)
    return peak_bytes


def _growth(request: Request) -> tuple[float, float, float]:
    """Return the seconds until the expected end, the bytes of KV now, and the growth per second."""
    model = request.model
    left_s = max(0, request.expected_tokens - request.num_tokens) * model.targets.tbt_s
    kv_bytes = request.context_tokens * model.kv_bytes_per_token
    return left_s, kv_bytes, model.kv_bytes_per_token / model.targets.tbt_s


def _batches(device: DeviceState) -> list[Batch]:
    queues = (device.working, device.queued, device.waiting_for_kv)
    return [batch for queue in queues for batch in queue.values()]


def _step_share(device: DeviceState, totals: Iterable[ModelTotals]) -> float:
    """Return the share of time for steps on target, at the share ``_GAMMA`` of all answers."""
    share = 0.0
    for total in totals:
        context_tokens = total.prompt_tokens + _GAMMA * total.answer_tokens
        step_s = device.speed(total.model).step_s(total.num_requests, round(context_tokens))
        share += step_s / total.model.targets.tbt_s
    return share


def _least_lead_s(device: DeviceState, now_s: float) -> float:
    """Return the least time until a running answer is late; answers that are late do not count."""
    leads_s = (
        request.next_deadline_s - now_s
        for batch in device.working.values()
        for request in batch.requests.values()
        if request.phase is RequestPhase.DECODING
    )
    return min((lead_s for lead_s in leads_s if lead_s >= 0), default=math.inf)


_CHOICES: dict[str, Choose] = {
    "best-fit": best_fit,
    "shortest-queue": shortest_queue,
    "power-of-two": power_of_two,
}
_SHORTEST_JOB = "request-level-sjf"
POLICY_NAMES = (*named.POLICY_NAMES, _SHORTEST_JOB, *_CHOICES)


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Return a new policy. Raises UsageError with the known names if ``name`` is unknown."""
    if name in _CHOICES:
        return PlacedOncePolicy(name, _CHOICES[name])
    if name == _SHORTEST_JOB:
        return ShortestJobPolicy()
    if name not in POLICY_NAMES:
        raise UsageError(f"no policy is named {name!r}", f"known: {', '.join(POLICY_NAMES)}")
    return named.make_policy(name, options)
