"""Invariants of the core's state between calls of ``handle``."""

from __future__ import annotations

import math

from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, RequestPhase, State

_SUMS = (
    "prompt_tokens",
    "expected_tokens",
    "num_waiting",
    "waiting_tokens",
    "waiting_tokens2",
    "cached_tokens",
    "context_tokens",
)


class InvariantBroken(AssertionError):
    """The state is inconsistent: a bug in the core, in a policy or in its input."""


def check_state(state: State) -> None:
    """Check the whole state; about a millisecond per thousand live requests.

    Raises:
        InvariantBroken: the message names both sides of the disagreement.
    """
    for name, model in state.models.items():
        _check_model(name, model, state)
    num_placed = len(state.held)
    for request_id, request in state.held.items():
        _check_request(request_id, request, RequestPhase.HELD, None, state)
    for number, device in state.devices.items():
        num_placed += _check_device(number, device, state)
    _check_turn_ids(state)
    # Each place has only live requests with matching phase and device, as checked above, so no
    # request is in two places. If the numbers agree, each request is in one place.
    if num_placed != len(state.requests):
        _fail(f"{len(state.requests)} requests are live, {num_placed} are held or on a device")


def _check_model(name: str, model: Model, state: State) -> None:
    if model.name != name:
        _fail(f"model {model.name} is known as {name}")
    if model.weight_bytes < 0 or model.kv_bytes_per_token < 0:
        _fail(f"model {name} has negative bytes: {model.weight_bytes}, {model.kv_bytes_per_token}")
    for kind, speed in model.speeds.items():
        if not (math.isfinite(speed.step_ratio) and speed.step_ratio >= 0):
            _fail(f"model {name} has a step ratio of {speed.step_ratio} on {kind or 'a device'}")
    for number in model.hosts:
        device = state.devices.get(number)
        if device is None:
            _fail(f"model {name} is hosted by device {number}, which is not up")
        elif name not in device.batches:
            _fail(f"model {name} is hosted by device {number}, which has no batch of it")


def _check_device(number: int, device: DeviceState, state: State) -> int:
    if device.number != number:
        _fail(f"device {device.number} is known as {number}")
    for name, batch in device.batches.items():
        where = f"the batch of {name} on device {number}"
        _check_batch(where, name, batch, device, state)
        if batch.requests and name not in device.working:
            _fail(f"{where} has requests, but is not among those worked on")
    for name, batch in device.working.items():
        if device.batches.get(name) is not batch or not batch.requests:
            _fail(f"device {number} works on {name}, of which it has no requests")
    for queues in (device.queued, device.waiting_for_kv):
        for name, batch in queues.items():
            if not batch.requests:
                _fail(f"device {number} has a queue of {name} without requests")
            _check_batch(f"the queue of {name} on device {number}", name, batch, device, state)
    _check_waiting(device)
    for request_id, request in device.moving.items():
        _check_request(request_id, request, RequestPhase.MOVING, device, state)
    for name, missing_bytes in device.missing_bytes.items():
        if name not in state.models:
            _fail(f"device {number} lacks bytes of {name}, which is no model")
        if missing_bytes < 0:
            _fail(f"device {number} lacks {missing_bytes} bytes of {name}")
    _check_turn(device)
    return device.num_requests


def _check_waiting(device: DeviceState) -> None:
    """Check that each request waiting for KV memory waits for a request that will free some."""
    if not device.waiting_for_kv:
        return
    if device.up.kv_host_bytes is None:
        _fail(f"device {device.number} has unlimited KV room, but requests wait for some")
    if not (device.working or device.queued or device.moving):
        _fail(f"requests wait for KV room on device {device.number}, which has nothing to do")


def _check_batch(where: str, name: str, batch: Batch, device: DeviceState, state: State) -> None:
    if state.models.get(name) is not batch.model:
        _fail(f"{where} is of {batch.model.name}, which is not the {name} that is known")
    if device.number not in batch.model.hosts:
        _fail(f"there is {where}, which does not host it")
    is_queue = any(batch is q.get(name) for q in (device.queued, device.waiting_for_kv))
    counted = Batch(batch.model, kind=device.up.kind)
    if batch.speed is not counted.speed:
        _fail(f"{where} has the speed of another kind of device than {device.up.kind}")
    for request_id, request in batch.requests.items():
        phase = RequestPhase.QUEUED if is_queue else _phase_in_batch(request)
        _check_request(request_id, request, phase, device, state)
        if request.model is not batch.model:
            _fail(f"{_named(request)} is in {where}")
        counted.add(request)
    for sum_name in _SUMS:
        said, true = getattr(batch, sum_name), getattr(counted, sum_name)
        if said != true:
            _fail(f"{where} says {sum_name} is {said}, but it is {true}")
    if list(batch.deadlines_s) != [request.next_deadline_s for request in batch.requests.values()]:
        _fail(f"{where} has deadlines that are not those of its requests")
    if batch.load() != counted.load():
        _fail(f"{where} says its load is {batch.load():.3g}, but it is {counted.load():.3g}")


def _phase_in_batch(request: Request) -> RequestPhase:
    return RequestPhase.SENT if request.phase is RequestPhase.SENT else RequestPhase.DECODING


def _check_request(
    request_id: str, request: Request, phase: RequestPhase, device: DeviceState | None, state: State
) -> None:
    place = "among the held" if device is None else f"on device {device.number}"
    if request.id != request_id or state.requests.get(request_id) is not request:
        _fail(f"{_named(request)} is {place} as {request_id}, but is not live under that id")
    if request.phase is not phase:
        _fail(f"{_named(request)} is {place} where only requests in phase {phase.name} belong")
    if request.device != (None if device is None else device.number):
        _fail(f"{_named(request)} is {place}, but says device {request.device}")
    if state.models.get(request.model.name) is not request.model:
        _fail(f"{_named(request)} is of a model that is not known (any more)")
    if device is not None and device.number not in request.model.hosts:
        _fail(f"{_named(request)} is {place}, which does not host its model")
    has_token = phase in (RequestPhase.DECODING, RequestPhase.MOVING)
    if request.expected_tokens < 0:
        _fail(f"{_named(request)} was to have {request.expected_tokens} tokens")
    if request.num_tokens < has_token or request.prompt_tokens < 0:
        _fail(f"{_named(request)} has {request.num_tokens} tokens after {request.prompt_tokens}")


def _check_turn(device: DeviceState) -> None:
    turn, then = device.turn, device.then
    if turn is None:
        if then is not None:
            _fail(f"device {device.number} has no turn, but {then} is to come after it")
        return
    if turn.model not in device.batches:
        _fail(f"device {device.number} has a turn of {turn.model}, which it does not host")
    if not turn.quota_s >= 0:
        _fail(f"device {device.number} has a turn of {turn.model} for {turn.quota_s} s")
    if then is None:
        return
    if then == turn.model:
        _fail(f"device {device.number} has a turn of {then} and {then} again after it")
    if then not in device.batches:
        _fail(f"device {device.number} runs {then} next, which it does not host")
    if not _has_work(device, then):
        _fail(f"device {device.number} runs {then} next, which has no requests there")


def _has_work(device: DeviceState, name: str) -> bool:
    if name in device.working:
        return True
    return name in device.queued or any(
        request.model.name == name for request in device.moving.values()
    )


def _check_turn_ids(state: State) -> None:
    seen: dict[int, int] = {}
    for device in state.devices.values():
        if device.turn is None:
            continue
        turn_id = device.turn.turn_id
        if not 0 < turn_id <= state.num_turns:
            _fail(f"device {device.number} has turn {turn_id} of {state.num_turns} so far")
        if turn_id in seen:
            _fail(f"devices {seen[turn_id]} and {device.number} both have turn {turn_id}")
        seen[turn_id] = device.number


def _named(request: Request) -> str:
    return f"request {request.id} of {request.model.name} in phase {request.phase.name}"


def _fail(what: str) -> None:
    raise InvariantBroken(what)
