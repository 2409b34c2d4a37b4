"""Capacities of a device for one more request (Aladdin, section 4.2), and the device's fill.

Aladdin's workers serve one model; here a device's models share its time and memory. The constraints
hold with a probability: predicted lengths get a margin from the deviation of earlier predictions.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpupoold.latency.shape import LatencyError
from gpupoold.scheduling.observed import OutputLengthPredictor
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request


class Constraint(StrEnum):
    """A capacity of a device, with the letters of the paper's program."""

    TBT = "tbt"  # (b) context and batch size make steps too slow
    TTFT = "ttft"  # (c) prefills placed together take too long
    LEAD = "lead"  # (d) running answers would fall behind during the prefill
    KV = "kv"  # (e) at some later time the KV of all does not fit


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters of the constraints.

    ``gamma`` (0 to 1) is the share of the answers at which steps must still be on time; ``theta``
    (0 to 1) holds some of (b) and (d) back. The predicted tokens of a model's answers on a device
    are exceeded with at most ``tail_probability``; with 1 they are the means.
    """

    gamma: float = 0.5
    theta: float = 1.0
    tail_probability: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 < self.theta <= 1 and 0 < self.tail_probability <= 1):
            raise ValueError(f"need gamma, theta and tail_probability from 0 to 1; got {self}")

    def margin_tokens(self, num_requests: int, deviation_tokens: float) -> float:
        """Return the tokens by which a sum of predictions may be exceeded (Aladdin, appendix G).

        Errors of requests are independent, so variances add up.
        """
        if self.tail_probability == 1:
            return 0.0
        deviation_tokens *= math.sqrt(num_requests)
        return cantelli_factor(self.tail_probability) * deviation_tokens


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


def violated(
    device: DeviceState,
    request: Request,
    lengths: OutputLengthPredictor,
    now_s: float,
    limits: Limits,
) -> Constraint | None:
    """Return the first capacity exceeded with one more request, None if the request fits."""
    totals = totals_of(device, request)
    if _step_share(device, totals, lengths, limits) > limits.theta:
        return Constraint.TBT
    prefill_s = device.speed(request.model).costs.prefill_s(request.context_tokens)
    if request.model.name not in device.working:
        prefill_s += device.switch_s(request.model)
    waiting_s = sum(batch.prefill_s() for batch in _batches(device))
    if waiting_s + prefill_s > request.next_deadline_s - now_s:
        return Constraint.TTFT
    if prefill_s > limits.theta * _least_lead_s(device, now_s):
        return Constraint.LEAD
    margin_bytes = sum(
        total.model.kv_bytes_per_token * _margin_tokens(total, lengths, limits) for total in totals
    )
    weight_bytes = max(total.model.weight_bytes for total in totals)
    room_bytes = (
        device.up.capacity_bytes + (device.up.kv_host_bytes or 0) - weight_bytes - margin_bytes
    )
    requests = [one for batch in _batches(device) for one in batch.requests.values()]
    if peak_kv_bytes([*requests, *device.moving.values(), request]) > room_bytes:
        return Constraint.KV
    return None


def load_norm(device: DeviceState, limits: Limits) -> float:
    """Return the fill for ordering devices: the L2 norm of batch size and weighted context."""
    totals = totals_of(device)
    context_tokens = sum(
        total.prompt_tokens + limits.gamma * total.answer_tokens for total in totals
    )
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


def _step_share(
    device: DeviceState,
    totals: Iterable[ModelTotals],
    lengths: OutputLengthPredictor,
    limits: Limits,
) -> float:
    """Return the share of time for steps on target, at the share ``gamma`` of all answers."""
    share = 0.0
    for total in totals:
        answer_tokens = total.answer_tokens + _margin_tokens(total, lengths, limits)
        context_tokens = total.prompt_tokens + limits.gamma * answer_tokens
        step_s = device.speed(total.model).step_s(total.num_requests, round(context_tokens))
        share += step_s / total.model.targets.tbt_s
    return share


def _margin_tokens(totals: ModelTotals, lengths: OutputLengthPredictor, limits: Limits) -> float:
    deviation_tokens = lengths.accuracy(totals.model.name).deviation
    return limits.margin_tokens(totals.num_requests, deviation_tokens)


def _least_lead_s(device: DeviceState, now_s: float) -> float:
    """Return the least time until a running answer is late; answers that are late do not count."""
    leads_s = (
        request.next_deadline_s - now_s
        for batch in device.working.values()
        for request in batch.requests.values()
        if request.phase is RequestPhase.DECODING
    )
    return min((lead_s for lead_s in leads_s if lead_s >= 0), default=math.inf)


def cantelli_factor(tail_probability: float) -> float:
    """Return the number of standard deviations that are rarely exceeded, for any distribution.

    A value exceeds the mean by more than ``sqrt((1 - tau) / tau)`` deviations with at most the
    probability ``tau`` (Aladdin, appendix G).
    """
    if not 0 < tail_probability < 1:
        raise LatencyError(f"a tail probability is between 0 and 1, got {tail_probability}")
    return math.sqrt((1 - tail_probability) / tail_probability)
