"""Placement of a request by the load of devices, and the devices of both stages of an answer.

Used by the policy `gpupool` and by the estimates of waiting times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from gpupoold.domain import Role
from gpupoold.scheduling.admission import admits, is_alone
from gpupoold.scheduling.policies.planned_turns import (
    FIRST_TOKEN_SHARE,
    LOAD_GRAIN,
    Loads,
    Tuning,
    load_of_batch,
    own_load,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, Speed, State

# The rule behind each part of a rank.
_RANK_RULES = (
    *(Rule.LEAST_LOADED, Rule.HOME, Rule.RESIDENT, Rule.NEAR_WEIGHTS),
    *(Rule.LEAST_LOADED, Rule.LEAST_LOADED),
)

# Largest number of tokens in a step: vLLM's usual limit on large GPUs.
MAX_CHUNK_TOKENS = 8192
# Share of the TBT target for a mixed step: predictions err, and contexts grow.
_TBT_SHARE = 0.9
# Step limits are multiples of this, so that orders do not change with every answer.
_CHUNK_GRAIN = 64
# Least spare share of a device's time that counts: waiting times contain the reciprocal.
_LEAST_SPARE = 0.05


def place(
    request: Request,
    devices: Sequence[DeviceState],
    loads: Loads,
    homes: dict[str, int],
    tuning: Tuning,
) -> tuple[DeviceState, Rule]:
    """Choose the planned home while the home keeps up, else as :func:`choose`, among helpers.

    All devices are eligible without a planned home, or if the home and its helpers are not among
    ``devices``. The home of an engine is chosen while it serves no other model.
    """
    planned = request.model.home
    if planned is None:
        return choose(request, devices, loads, homes, tuning)
    home = next((device for device in devices if device.number == planned.device), None)
    able = able_devices(request.model, devices)
    if home is None:
        return choose(request, able, loads, homes, tuning)
    if planned.helpers is None:
        is_eligible = is_alone(request.model.name, home)
    elif len(able) == 1:
        return home, Rule.PLANNED_HOME
    else:
        is_eligible = True
    if is_eligible and loads.of(home) <= tuning.full_load and admits(home, request):
        return home, Rule.PLANNED_HOME
    return choose(request, able, loads, homes, tuning)


def able_devices(model: Model, devices: Sequence[DeviceState]) -> Sequence[DeviceState]:
    """Return the model's planned home and its helpers of ``devices``, all without any."""
    home = model.home
    if home is None or home.helpers is None:
        return devices
    numbers = home.helpers | {home.device}
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
    roomy = [device for device in serving if admits(device, request)]
    keeping_up = [device for device in roomy if loads.of(device) <= full_load]
    if serving:
        # A device of its own is worth a copy, above all if none keeps up.
        joined = min(serving, key=lambda device: (loads.of(device), device.number))
        if keeping_up:
            joined = max(keeping_up, key=lambda device: (_num_of(model, device), -device.number))
        free = _free_of_others(request, joined, devices, loads, tuning)
        if free is not None:
            return free, Rule.FREE_OF_OTHERS
        if keeping_up:
            return joined, Rule.SERVED_THERE
    if roomy and not any(_is_mostly(model, device, loads) for device in roomy):
        return min(roomy, key=lambda device: (loads.of(device), device.number)), Rule.SERVED_THERE
    home = homes.get(model.name)
    ranked = sorted(devices, key=lambda device: _rank(device, model, home, loads))
    admitting = next((device for device in ranked if admits(device, request)), None)
    chosen = admitting or min(ranked, key=lambda device: device.num_waiting_for_kv)
    if serving and not is_worth_a_copy(request, chosen, loads, tuning):
        return min(
            roomy or serving, key=lambda device: (loads.of(device), device.number)
        ), Rule.NO_COPY
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
    ranked = sorted(
        free,
        key=lambda device: (
            *(device.missing(model) > 0, model.name in device.far),
            *(loads.of(device), device.number),
        ),
    )
    return ranked[0] if ranked else None


def _rule_of(
    chosen: DeviceState, ranked: Sequence[DeviceState], model: Model, home: int | None, loads: Loads
) -> Rule:
    """Return the rule that ranks the chosen device before the next."""
    if chosen is not ranked[0]:
        return Rule.KV_ROOM
    if len(ranked) == 1:
        return Rule.ONLY_DEVICE
    first, second = (_rank(device, model, home, loads) for device in ranked[:2])
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
    return bool(moving) and any(request.model is model for request in moving.values())


def _is_mostly(model: Model, device: DeviceState, loads: Loads) -> bool:
    """Return whether the model has at least half of the device's load.

    Moving other models away would not help then.
    """
    batch = device.working.get(model.name)
    if batch is None:  # all its requests may be migrating
        moving = device.moving.values()
        return (
            bool(moving)
            and not device.working
            and all(request.model is model for request in moving)
        )
    return load_of_batch(batch, device) >= 0.5 * loads.of(device)


def _num_of(model: Model, device: DeviceState) -> int:
    batches = device.working.get(model.name), device.queued.get(model.name)
    num_here = sum(len(batch.requests) for batch in batches if batch is not None)
    return num_here + sum(request.model is model for request in device.moving.values())


def _rank(
    device: DeviceState, model: Model, home: int | None, loads: Loads
) -> tuple[int, bool, bool, bool, float, int]:
    load = loads.of(device)
    return (
        round(load / LOAD_GRAIN),
        device.number != home,
        device.missing(model) > 0,
        model.name in device.far,
        load,
        device.number,
    )


def chunk_tokens(batch: Batch, limit_s: float = math.inf) -> int:
    """Return the limit of a step of this batch: prompt tokens plus one per answer.

    The limit keeps the step within the target and ``limit_s`` by the latency model, and allows at
    least one grain of prompt tokens: prompts on the device must end, even if answers are late.

    Decode devices take prompts without delaying answers (TokenScale, sections IV-D and IV-E).
    """
    num_running = len(batch.requests) - batch.num_waiting
    longest = batch.waiting_tokens2 // batch.waiting_tokens if batch.waiting_tokens else 0
    tokens = _largest(batch, num_running, batch.context_tokens, longest, limit_s)
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
    others = [other for other in device.working.values() if other is not batch]
    spare = 1.0 - sum(load_of_batch(other, device) for other in others)
    if velocity <= 0.0 or spare < _LEAST_SPARE or not has_prefill_room(request, device, velocity):
        return math.inf
    tokens = request.prefill_tokens + sum(batch.waiting_tokens for batch in _batches(device))
    switch_s = 0.0 if model.name in device.working else device.switch_s(model)
    return switch_s + tokens / (velocity * spare)


def has_prefill_room(request: Request, device: DeviceState, velocity: float) -> bool:
    """Return whether the prompt fits into the KV reserved for prefills beside the answers.

    Prompts wait only up to what the device can prefill within the target of the first token, and
    all requests on the device or on the way must fit without the host cache.
    """
    model = request.model
    room_bytes = device.up.capacity_bytes - model.weight_bytes
    kept_bytes = sum(batch.kv_need_bytes for batch in _batches(device))
    kept_bytes += sum(request.kv_need_bytes for request in device.moving.values())
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
        (not admits(device, request), prefill_in_s(request, device), device.number, device)
        for device in devices
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


def _largest(
    batch: Batch,
    num_running: int,
    context_tokens: int,
    longest_prompt: int,
    limit_s: float = math.inf,
) -> int:
    """Return the tokens of a step at the target, or of ``limit_s`` if shorter; a prompt's last
    chunk attends to the whole prompt.
    """
    base_s = _base_s(batch.speed, num_running, context_tokens)
    chunk_s, tbt_s = batch.speed.costs.chunk_s, batch.model.targets.tbt_s

    def step_s(num_tokens: int) -> float:
        return base_s + chunk_s(longest_prompt, max(0, num_tokens - num_running))

    return largest_chunk_tokens(step_s, min(_TBT_SHARE * tbt_s, limit_s), MAX_CHUNK_TOKENS)


def _base_s(speed: Speed, num_running: int, context_tokens: int) -> float:
    if num_running:
        return speed.step_s(num_running, context_tokens)
    return max(speed.costs.prefill_base_s, 0.0)


def _batches(device: DeviceState) -> list[Batch]:
    return [*device.working.values(), *device.queued.values(), *device.waiting_for_kv.values()]


def largest_chunk_tokens(step_s: Callable[[int], float], tbt_s: float, max_tokens: int) -> int:
    """Return the largest chunk of a mixed step within the target between tokens (section IV-D).

    A chunk counts the prompt tokens and one token per running answer; ``step_s`` returns the time
    of such a step and must not decrease. 0 means that not even one token is on time.
    """
    fits, too_many = 0, max_tokens + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if step_s(middle) <= tbt_s:
            fits = middle
        else:
            too_many = middle
    return fits


def convertible_prefill_velocity(chunk_tokens: int, mean_batch_size: float, step_s: float) -> float:
    """Return the prompt tokens/s beside running answers: ``(chunk - batch) / step`` (eq. 5).

    0 if the answers alone fill the chunk. ``step_s`` is the target between tokens, or the
    measured time of a step with a full chunk.
    """
    return max(0.0, chunk_tokens - mean_batch_size) / step_s


def reserved_kv_bytes(velocity: float, ttft_s: float, kv_bytes_per_token: float) -> float:
    """Return the memory that a convertible decoder reserves for one prefill (equation 6).

    The memory holds the tokens that the decoder can prefill within the target of the first token:
    a longer prompt goes elsewhere. The time factor is inferred from the paper's text, which names
    the other two factors.
    """
    return velocity * ttft_s * kv_bytes_per_token
