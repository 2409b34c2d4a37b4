"""Background requests: requests of batches, which run in time that other requests leave.

Their deadlines are hours away, so their turns come last, and they join the steps of other answers
of their model. The daemon passes a background request to the core only if a device can take the
request (:func:`has_room`), so that others find short steps and free memory. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, State

# Longest step with one more background request, as a share of the TBT target.
_STEP_SHARE = 0.5
# Largest share of the memory beside the weights for KV of background requests.
_KV_SHARE = 0.5


def has_room(state: State, model: Model, num_prompt_tokens: int, max_tokens: int) -> bool:
    """Return whether some device can take one more background request now."""
    num_tokens = num_prompt_tokens + min(
        max_tokens, round(state.lengths.predict(model.name, num_prompt_tokens))
    )
    return any(_can_take(host, model, num_tokens) for host in state.prefill_hosts(model))


def most_spare(request: Request, devices: Sequence[DeviceState]) -> DeviceState:
    """Return the device for a background request: with the least work of others, then resident.

    At least one device is required.
    """

    def rank(device: DeviceState) -> tuple[bool, int, bool, int, int]:
        context_tokens = request.prompt_tokens + request.expected_tokens
        return (
            not _can_take(device, request.model, context_tokens),
            num_others(device),
            device.missing(request.model) > 0,
            device.num_requests,
            device.number,
        )

    return min(devices, key=rank)


def num_others(device: DeviceState) -> int:
    """Return the number of a device's requests that are not background requests."""
    batches = (*device.working.values(), *device.queued.values(), *device.waiting_for_kv.values())
    num_here = sum(len(batch.requests) - batch.num_background for batch in batches)
    return num_here + sum(not one.is_background for one in device.moving.values())


def is_background_turn(device: DeviceState) -> bool:
    """Return whether the present turn is for background requests only."""
    on_turn = None if device.turn is None else device.turn.model
    batch = None if on_turn is None else device.working.get(on_turn)
    return batch is not None and batch.is_background and on_turn not in device.queued


def _can_take(device: DeviceState, model: Model, num_tokens: int) -> bool:
    """Return whether a device can take a background request with ``num_tokens`` at its end."""
    if device.waiting_for_kv or any(_has_prompts(one) for one in device.working.values()):
        return False
    if any(batch.num_background < len(batch.requests) for batch in device.queued.values()):
        return False
    batch, queued = device.batches[model.name], device.queued.get(model.name)
    num_queued = len(queued.requests) if queued else 0
    num_requests = len(batch.requests) + num_queued + 1
    queued_tokens = queued.prompt_tokens + queued.expected_tokens if queued else 0
    context_tokens = batch.prompt_tokens + batch.expected_tokens + queued_tokens + num_tokens
    step_s = batch.speed.step_s(num_requests, context_tokens)
    if num_requests > 1 and step_s > _STEP_SHARE * model.targets.tbt_s:
        return False
    free_bytes = device.up.capacity_bytes - model.weight_bytes
    return _kv_bytes(device) + num_tokens * model.kv_bytes_per_token <= _KV_SHARE * free_bytes


def _has_prompts(batch: Batch) -> bool:
    """Return whether a request that is not a background request waits for its first token."""
    if batch.num_waiting <= 0 or batch.is_background:
        return False
    return any(
        not request.is_background and not request.num_tokens for request in batch.requests.values()
    )


def _kv_bytes(device: DeviceState) -> float:
    """Return the bytes of KV at the expected ends of the device's background requests."""
    batches = (*device.working.values(), *device.queued.values())
    return sum(
        (request.prompt_tokens + request.expected_tokens) * request.model.kv_bytes_per_token
        for batch in batches
        if batch.num_background
        for request in batch.requests.values()
        if request.is_background
    )
