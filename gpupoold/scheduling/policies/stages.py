"""Prefill and decode on different devices: on-time placement of prompts, and chunked prefill.

Decode devices take prompts without delaying answers (TokenScale, sections IV-D and IV-E).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gpupoold.domain import Role
from gpupoold.scheduling.kv_admission import admits
from gpupoold.scheduling.policies.planned_turns import FIRST_TOKEN_SHARE, load_of_batch
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Request, Speed, State
from gpupoold.scheduling.velocity import (
    convertible_prefill_velocity,
    largest_chunk_tokens,
    reserved_kv_bytes,
)

# Largest number of tokens in a step: vLLM's usual limit on large GPUs.
MAX_CHUNK_TOKENS = 8192
# Share of the TBT target for a mixed step: predictions err, and contexts grow.
_TBT_SHARE = 0.9
# Step limits are multiples of this, so that orders do not change with every answer.
_CHUNK_GRAIN = 64
# Least spare share of a device's time that counts: waiting times contain the reciprocal.
_LEAST_SPARE = 0.05


def chunk_tokens(batch: Batch) -> int:
    """Return the limit of a step of this batch: prompt tokens plus one per answer.

    The limit keeps the step within the target by the latency model, and allows at least one grain
    of prompt tokens: prompts on the device must end, even if answers alone are late.
    """
    num_running = len(batch.requests) - batch.num_waiting
    longest = batch.waiting_tokens2 // batch.waiting_tokens if batch.waiting_tokens else 0
    tokens = _largest(batch, num_running, batch.context_tokens, longest)
    return max(tokens // _CHUNK_GRAIN, -(-num_running // _CHUNK_GRAIN) + 1) * _CHUNK_GRAIN


def would_delay_answers(batch: Batch, now_s: float, expired_s: float) -> bool:
    """Return whether prefilling the prompts at once would make on-time answers late.

    Prompts shorter than one target between tokens never count.
    """
    prefill_s, tbt_s = batch.prefill_s(), batch.model.targets.tbt_s
    if prefill_s <= tbt_s or batch.num_waiting == len(batch.requests):
        return False
    latest_s = now_s + prefill_s + batch.step_s()
    return any(
        now_s - expired_s <= request.next_deadline_s < latest_s
        for request in batch.requests.values()
        if request.num_tokens
    )


def convertible_velocity(batch: Batch, prompt_tokens: int) -> float:
    """Return the prompt tokens per second of a decode device beside this batch (equation 5)."""
    num_running = len(batch.requests) - batch.num_waiting
    tokens = _largest(batch, num_running, batch.context_tokens, prompt_tokens)
    num_new = max(0, tokens - num_running)
    step_s = _base_s(batch.speed, num_running, batch.context_tokens)
    step_s += batch.speed.costs.chunk_s(prompt_tokens, num_new)
    return convertible_prefill_velocity(tokens, num_running, max(step_s, 1e-6))


def prefill_in_s(request: Request, device: DeviceState) -> float:
    """Return the seconds until a prefilling device has the request's first token.

    All waiting prompts precede the request, whatever the model; a device that decodes too has only
    the time that its answers leave.
    """
    model = request.model
    backlog_s = device.speed(model).costs.prefill_s(request.prefill_tokens)
    backlog_s += sum(batch.prefill_s() for batch in _batches(device))
    if model.name not in device.working:
        backlog_s += device.switch_s(model)
    if device.role is Role.PREFILL:
        return backlog_s
    decoding = sum(batch.step_s() / batch.model.targets.tbt_s for batch in device.working.values())
    return backlog_s / max(1.0 - decoding, _LEAST_SPARE)


def converted_in_s(request: Request, device: DeviceState) -> float:
    """Return the seconds until a decode device has the first token, prefilling in chunks.

    Infinite if the answers leave no time, or the memory no space (equation 6).
    """
    model = request.model
    batch = device.batches[model.name]
    velocity = convertible_velocity(batch, request.context_tokens)
    others = [one for one in device.working.values() if one is not batch]
    spare = 1.0 - sum(load_of_batch(other, device) for other in others)
    if velocity <= 0.0 or spare < _LEAST_SPARE or not has_prefill_room(request, device, velocity):
        return math.inf
    tokens = request.prefill_tokens + sum(one.waiting_tokens for one in _batches(device))
    switch_s = 0.0 if model.name in device.working else device.switch_s(model)
    return switch_s + tokens / (velocity * spare)


def has_prefill_room(request: Request, device: DeviceState, velocity: float) -> bool:
    """Return whether the prompt fits into the KV reserved for prefills beside the answers.

    Prompts wait only up to what the device can prefill within the target of the first token, and
    all requests on the device or on the way must fit without the host cache.
    """
    model = request.model
    room_bytes = device.capacity_bytes - model.weight_bytes
    kept_bytes = sum(batch.kv_need_bytes for batch in _batches(device))
    kept_bytes += sum(one.kv_need_bytes for one in device.moving.values())
    reserve = reserved_kv_bytes(velocity, model.targets.ttft_s, model.kv_bytes_per_token)
    waiting_bytes = sum(
        (batch.waiting_tokens + batch.cached_tokens) * batch.model.kv_bytes_per_token
        for batch in _batches(device)
    )
    fits_reserve = waiting_bytes + request.context_tokens * model.kv_bytes_per_token <= reserve
    return fits_reserve and kept_bytes + request.kv_need_bytes <= room_bytes


def stage(
    request: Request,
    devices: Sequence[DeviceState],
    state: State,
    now_s: float,
    *,
    converts_decoders: bool = True,
) -> tuple[DeviceState, Rule, float]:
    """Choose the device for the prefill in two rounds (TokenScale, algorithm 1), with its time.

    The first choice is the best of ``devices``, which take prompts, if its first token is on time;
    else the device with the earliest first token, decode devices included.
    """
    in_s, chosen = best_prefiller(request, devices)
    ttft_s = request.model.targets.ttft_s
    is_in_time = now_s + in_s <= request.counted_arrival_s + FIRST_TOKEN_SHARE * ttft_s
    if is_in_time or not converts_decoders:
        return chosen, Rule.PREFILLS, in_s
    decoders = [host for host in state.decode_hosts(request.model) if host not in devices]
    converted_s, converted = best_converted(request, decoders)
    if converted is not None and converted_s < in_s:
        return converted, Rule.CONVERTED, converted_s
    return chosen, Rule.PREFILLS, in_s


def best_prefiller(request: Request, devices: Iterable[DeviceState]) -> tuple[float, DeviceState]:
    """Return the prefilling device with the earliest first token, devices with KV memory first."""
    ranked = [
        (not admits(one, request), prefill_in_s(request, one), one.number, one) for one in devices
    ]
    _, in_s, _, device = min(ranked)
    return in_s, device


def best_converted(
    request: Request, devices: Iterable[DeviceState]
) -> tuple[float, DeviceState | None]:
    """Return the decode device with the earliest first token; infinity and None without one."""
    soonest_s, best = math.inf, None
    for device in devices:
        in_s = converted_in_s(request, device) if admits(device, request) else math.inf
        if in_s < soonest_s:
            soonest_s, best = in_s, device
    return soonest_s, best


def _largest(batch: Batch, num_running: int, context_tokens: int, longest_prompt: int) -> int:
    """Return the tokens of a step at the target; a prompt's last chunk attends to the whole
    prompt.
    """
    base_s = _base_s(batch.speed, num_running, context_tokens)
    chunk_s, tbt_s = batch.speed.costs.chunk_s, batch.model.targets.tbt_s

    def step_s(num_tokens: int) -> float:
        return base_s + chunk_s(longest_prompt, max(0, num_tokens - num_running))

    return largest_chunk_tokens(step_s, _TBT_SHARE * tbt_s, MAX_CHUNK_TOKENS)


def _base_s(speed: Speed, num_running: int, context_tokens: int) -> float:
    if num_running:
        return speed.step_s(num_running, context_tokens)
    return max(speed.costs.prefill_base_s, 0.0)


def _batches(device: DeviceState) -> list[Batch]:
    return [*device.working.values(), *device.queued.values(), *device.waiting_for_kv.values()]
