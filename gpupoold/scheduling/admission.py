"""The requests that may be sent to a device: those with memory for KV, in the order of prefills.

KV without space on a device is offloaded to its host cache; when the cache is full, KV would be
dropped and recomputed. So requests wait in the daemon while the reservations of sent requests
(``kv_need_bytes``) leave no space. The device provides the memory beside the weights of its largest
working model; the host cache provides the rest.

A lone request is always admitted: a guarantee of progress.

Within a model, requests that can be on time go first: the policy would defer the others
(:func:`prefill_order`), and deferred requests must not hold memory. A request that has waited for
``PATIENCE_S`` goes first again, one at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupoold.scheduling.state import (
    HEAD_START,
    Batch,
    DeviceState,
    Model,
    Request,
    RequestPhase,
    Speed,
    State,
)

# A request that has waited this long is starving.
PATIENCE_S = 60.0
# Blocks do not fill the slabs of the host cache: an eighth of a slab may stay unused.
HOST_SHARE = 7 / 8

# Longest step with one more background request, as a share of the TBT target.
_STEP_SHARE = 0.5
# Largest share of the memory beside the weights for KV of background requests.
_KV_SHARE = 0.5

# Largest share of a device's time that answers are assumed to take between prefills.
_MOST_DECODE_SHARE = 0.8


def admits(device: DeviceState, request: Request) -> bool:
    """Return whether a request could be sent now: its KV fits, and no request precedes it."""
    if device.up.kv_host_bytes is None:
        return True
    return _next(device, request.arrival_s, request) is request and _has_room(device, request)


def admit(device: DeviceState, now_s: float) -> None:
    """Queue requests from the line for KV memory, as far as there is memory now.

    A queued request waits again if other requests' KV has grown into its memory, or if it is
    late and a request that can be on time waits. Within a model requests keep their order except
    for priority and for late requests. The model with the least KV is next, and no other
    model gets memory until its first request fits. Thus memory accumulates for a large request
    too, and no model's backlog blocks another model. Among equals, for example on an empty device,
    the request for which memory was accumulated stays next.
    A request that has got memory in this call keeps the memory until the next call: which requests
    are late depends on the models with queued requests, so two requests could otherwise take the
    memory from each other without end.
    """
    if device.up.kv_host_bytes is None:
        return
    if device.queued and not _has_room(device):
        _put_back(device, device.queued_requests())
    admitted: set[str] = set()
    while device.waiting_for_kv:
        request = _next(device, now_s)
        if request is None:
            return
        if not (_has_room(device, request) or _gets_room(device, request, admitted, now_s)):
            device.first_for_kv = request.id
            return
        device.dequeue(request)
        device.enqueue(request)
        admitted.add(request.id)


def num_ahead(device: DeviceState, now_s: float) -> int:
    """Return the number of waiting requests that get memory before a new request."""
    lines = device.waiting_for_kv
    orders = [(name, _order(device, name, now_s)) for name in lines]
    return sum(
        request.id in lines[name].requests for name, order in orders for request in order.on_time
    )


def _gets_room(device: DeviceState, request: Request, kept: Collection[str], now_s: float) -> bool:
    """Return whether a request fits after late requests have given their memory back.

    Only a request that can be on time gets memory in this way; starving requests and the requests
    ``kept`` keep their memory.
    """
    if request not in _order(device, request.model.name, now_s).on_time:
        return False
    for name in list(device.queued):
        queued = device.queued[name].requests
        late = _order(device, name, now_s).late
        left = [each for each in late if each.id in queued and each.id not in kept]
        _put_back(device, [each for each in left if not _is_starving(each, now_s)])
    return _has_room(device, request)


def _is_starving(request: Request, now_s: float) -> bool:
    return now_s - request.arrival_s > PATIENCE_S


def _order(device: DeviceState, name: str, now_s: float) -> PrefillOrder:
    """Return the order of a model's prompts that are not sent, with memory or without."""
    batches = [line[name] for line in (device.queued, device.waiting_for_kv) if name in line]
    return order_of(batches, device, now_s)


def _put_back(device: DeviceState, requests: Sequence[Request]) -> None:
    """Move queued requests back to waiting, before the waiting requests of their model."""
    for name in dict.fromkeys(request.model.name for request in requests):
        behind = device.waiting_for_kv.pop(name, None)
        for request in [request for request in requests if request.model.name == name]:
            device.queued[name].remove(request)
            device.enqueue(request, must_wait=True)
        for request in behind.requests.values() if behind else ():
            device.enqueue(request, must_wait=True)
        if not device.queued[name].requests:
            del device.queued[name]


def _first(device: DeviceState, name: str, now_s: float) -> tuple[Request, bool]:
    """Return the request of a model's queue that gets memory first, and whether it is late.

    A starving request is first, and counts as on time, unless another has memory already.
    """
    line, queued = device.waiting_for_kv[name].requests, device.queued.get(name)
    oldest = next(iter(line.values()))
    if _is_starving(oldest, now_s):
        others = queued.requests.values() if queued else ()
        if not any(_is_starving(other, now_s) for other in others):
            return oldest, False
    on_time = _order(device, name, now_s).on_time
    first = next((request for request in on_time if request.id in line), None)
    return (oldest, True) if first is None else (first, False)


def _next(device: DeviceState, now_s: float, newcomer: Request | None = None) -> Request | None:
    """Return the next request to get memory, among the waiting requests and ``newcomer``.

    A model that has all the KV that fits beside its weights is skipped: only its own requests can
    free memory for the next request, so the model must not block other models.
    """
    firsts = {name: _first(device, name, now_s) for name in device.waiting_for_kv}
    if newcomer is not None and firsts.get(newcomer.model.name, (newcomer, True))[1]:
        firsts[newcomer.model.name] = newcomer, False
    best, best_rank = None, (math.inf, True, math.inf)
    for request, _ in firsts.values():
        kept_bytes = _kept_bytes(device, request.model)
        own_bytes = device.up.capacity_bytes - request.model.weight_bytes
        if kept_bytes and kept_bytes + request.kv_need_bytes > own_bytes:
            continue
        rank = kept_bytes, request.id != device.first_for_kv, request.arrival_s
        if best is None or rank < best_rank:
            best, best_rank = request, rank
    return best


def _kept_bytes(device: DeviceState, model: Model) -> float:
    batches = [line[model.name] for line in (device.working, device.queued) if model.name in line]
    moving = [request for request in device.moving.values() if request.model is model]
    kept_bytes = sum(batch.kv_need_bytes for batch in batches)
    return sum((request.kv_need_bytes for request in moving), kept_bytes)


def _has_room(device: DeviceState, newcomer: Request | None = None) -> bool:
    assert device.up.kv_host_bytes is not None
    kept_bytes, num_requests, weight_bytes = 0.0, 0, 0
    for batch in (*device.working.values(), *device.queued.values()):
        kept_bytes += batch.kv_need_bytes
        num_requests += len(batch.requests)
        weight_bytes = max(weight_bytes, batch.model.weight_bytes)
    for request in (*device.moving.values(), *((newcomer,) if newcomer else ())):
        kept_bytes += request.kv_need_bytes
        num_requests += 1
        weight_bytes = max(weight_bytes, request.model.weight_bytes)
    room_bytes = device.up.capacity_bytes - weight_bytes + HOST_SHARE * device.up.kv_host_bytes
    return kept_bytes <= room_bytes or num_requests <= 1


def has_room(state: State, model: Model, num_prompt_tokens: int, max_tokens: int) -> bool:
    """Return whether some device can take one more background request now.

    Deadlines of background requests are hours away, so their turns come last, and they join the
    steps of other answers of their model. The daemon passes such a request to the core only if a
    device has room, so that others find short steps and free memory.
    """
    num_tokens = num_prompt_tokens + min(
        max_tokens, round(state.lengths.predict(model.name, num_prompt_tokens))
    )
    return any(_can_take(host, model, num_tokens) for host in state.prefill_hosts(model))


def most_spare(request: Request, devices: Sequence[DeviceState]) -> DeviceState:
    """Return the device for a background request: with the least work of others, then resident.

    At least one device is required.
    """
    context_tokens = request.prompt_tokens + request.expected_tokens

    def rank(device: DeviceState) -> tuple[bool, int, bool, int, int]:
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
    return num_here + sum(not request.is_background for request in device.moving.values())


def is_background_turn(device: DeviceState) -> bool:
    """Return whether the present turn is for background requests only."""
    on_turn = None if device.turn is None else device.turn.model
    batch = None if on_turn is None else device.working.get(on_turn)
    return batch is not None and batch.is_background and on_turn not in device.queued


def _can_take(device: DeviceState, model: Model, num_tokens: int) -> bool:
    """Return whether a device can take a background request with ``num_tokens`` at its end."""
    if device.waiting_for_kv or any(_has_prompts(batch) for batch in device.working.values()):
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


class PrefillOrder(NamedTuple):
    """Queued requests in order of execution; ``late`` requests cannot be on time.

    Prism's algorithm 2 within one model. While all queued requests can be on time, all are sent at
    once. Otherwise as many first tokens as possible are kept on time: the other requests are
    deferred, and the device gets only its next prefills, so that a request that arrives later can
    precede.
    """

    on_time: Sequence[Request]
    late: Sequence[Request]


def prefill_order(
    queued: Collection[Request], prefill_s: float, speed: Speed, start_s: float, factor: float = 1.0
) -> PrefillOrder:
    """Return the order of a model's queued requests, if the first prefill begins at ``start_s``.

    ``prefill_s``: sum of the queued prefills; ``factor``: seconds until a prefill has ended, per
    second of prefill.
    """
    if start_s + factor * prefill_s <= min(
        (request.next_deadline_s for request in queued), default=0.0
    ):
        return PrefillOrder(list(queued), ())
    expired: list[Request] = []
    jobs: list[Job] = []
    by_id: dict[str, Request] = {}
    for request in queued:
        deadline_s = request.next_deadline_s
        if deadline_s < start_s:
            expired.append(request)
            continue
        by_id[request.id] = request
        jobs.append(_job(request, deadline_s, speed, factor))
    admission = most_on_time(jobs, start_s)
    late = [by_id[job.job_id] for job in admission.late]
    on_time = [by_id[job.job_id] for job in admission.on_time]
    if len({request.priority for request in on_time}) > 1:
        on_time.sort(key=_due_with_head_start_s)
    return PrefillOrder(on_time, expired + late)


def order_of(queues: Sequence[Batch], device: DeviceState, now_s: float) -> PrefillOrder:
    """Return the order of a model's requests in ``queues``, behind the prompts sent already."""
    model, speed = queues[0].model, queues[0].speed
    working = device.working.get(model.name)
    factor = time_factor(working) if is_alone(model.name, device) else 1.0
    start_s = now_s + (factor * working.prefill_s() if working else 0.0)
    requests = [request for queue in queues for request in queue.requests.values()]
    prefill_s = sum(queue.prefill_s() for queue in queues)
    return prefill_order(requests, prefill_s, speed, start_s, factor)


def is_alone(name: str, device: DeviceState) -> bool:
    """Return whether no other model has work on the device."""
    return not (device.working.keys() | device.queued.keys()) - {name}


def time_factor(working: Batch | None) -> float:
    """Return the seconds until a prefill has ended, per second of prefill, of a model alone.

    Answers of the batch are decoded between the prefills, at the pace of their target.
    """
    num_running = len(working.requests) - working.num_waiting if working is not None else 0
    if working is None or not num_running:
        return 1.0
    step_s = working.speed.step_s(num_running, working.context_tokens)
    return 1.0 / (1.0 - min(step_s / working.model.targets.tbt_s, _MOST_DECODE_SHARE))


def next_prefills(
    order: PrefillOrder, working: Batch | None, speed: Speed, ahead_s: float
) -> Sequence[Request]:
    """Return the requests to send now.

    That is all requests if none is late. Otherwise prompts are sent until the device has prompts
    for ``ahead_s`` and at least two, late requests only if no request can be on time.
    """
    if not order.late:
        return order.on_time
    sent_s, num_sent = (working.prefill_s(), working.num_waiting) if working else (0.0, 0)
    chosen: list[Request] = []
    for request in order.on_time or order.late:
        if sent_s >= ahead_s and num_sent >= 2:
            break
        chosen.append(request)
        num_sent += 1
        sent_s += speed.costs.prefill_s(request.prefill_tokens)
    return chosen


def split_by_deadline(
    requests: Iterable[Request],
    deadlines_s: Iterable[float],
    expired_at_s: float,
    speed: Speed,
    start_s: float,
) -> tuple[list[float], list[float], float]:
    """Return the deadlines of on-time and of late requests, and the on-time prefills' seconds.

    ``deadlines_s`` are those of ``requests``; requests whose next token was due before
    ``expired_at_s`` are left out. The first prefill begins at ``start_s``.
    """
    on_time_s: list[float] = []
    jobs: list[Job] = []
    sent_s = 0.0
    for request, deadline_s in zip(requests, deadlines_s, strict=True):
        if deadline_s < expired_at_s:
            continue
        if request.phase is RequestPhase.QUEUED:
            jobs.append(_job(request, deadline_s, speed))
            continue
        on_time_s.append(deadline_s)
        if request.phase is not RequestPhase.DECODING:
            sent_s += speed.costs.prefill_s(request.prefill_tokens)
    admission = most_on_time(jobs, start_s + sent_s)
    on_time_s += [job.deadline_s for job in admission.on_time]
    late_s = [job.deadline_s for job in admission.late]
    return on_time_s, late_s, sent_s + sum(job.duration_s for job in admission.on_time)


def _due_with_head_start_s(request: Request) -> float:
    head_start_s = HEAD_START[request.priority] * request.model.targets.ttft_s
    return request.next_deadline_s - head_start_s


def _job(request: Request, deadline_s: float, speed: Speed, factor: float = 1.0) -> Job:
    duration_s = factor * speed.costs.prefill_s(request.prefill_tokens)
    return Job(request.id, duration_s, deadline_s, HEAD_START[request.priority])


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting prefill: its duration including the switch, and its deadline.

    Times are seconds, deadlines on the clock of ``now_s``. A job is not late for the sake of jobs
    with a lower ``priority``. Raises ValueError for a negative or infinite duration, and for a
    deadline that is not a number.
    """

    job_id: str
    duration_s: float
    deadline_s: float
    priority: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.duration_s < math.inf or math.isnan(self.deadline_s):
            raise ValueError(f"a duration is finite and not negative, a deadline a number: {self}")


@dataclass(frozen=True, slots=True)
class Admission:
    """A split of the jobs: on-time jobs in order of execution, and late jobs.

    ``late`` is in order of deadline too; late jobs run last, because no place in the order meets
    their deadlines.
    """

    on_time: tuple[Job, ...]
    late: tuple[Job, ...]

    @property
    def order(self) -> tuple[Job, ...]:
        """All jobs in order of execution: no on-time job waits for a late job."""
        return self.on_time + self.late


def most_on_time(jobs: Iterable[Job], now_s: float = 0.0) -> Admission:
    """Return the largest set of jobs that one device can finish on time, and the order.

    Moore and Hodgson: take jobs by deadline; when the latest is late, drop the longest taken so
    far. Optimal in number for jobs of equal priority that are all ready at ``now_s`` and run one
    after the other; O(n log n). Priorities are served from the highest: jobs of the next priority
    are added as far as no earlier choice becomes late. Prism, algorithm 2, applies the algorithm
    to the prefills waiting for one GPU.
    """
    by_deadline = sorted(jobs, key=lambda job: (job.deadline_s, job.duration_s))
    is_chosen = [False] * len(by_deadline)
    for priority in sorted({job.priority for job in by_deadline}, reverse=True):
        _choose(by_deadline, is_chosen, priority, now_s)
    pairs = list(zip(by_deadline, is_chosen, strict=True))
    return Admission(
        on_time=tuple(job for job, chosen in pairs if chosen),
        late=tuple(job for job, chosen in pairs if not chosen),
    )


def _choose(
    by_deadline: Sequence[Job], is_chosen: list[bool], priority: float, now_s: float
) -> None:
    """Add jobs of one priority to the chosen jobs, which stay on time."""
    longest_first: list[tuple[float, int]] = []  # (-duration, position), of this priority
    end_s = now_s
    for position, job in enumerate(by_deadline):
        if job.priority == priority:
            is_chosen[position] = True
            heapq.heappush(longest_first, (-job.duration_s, position))
        elif not is_chosen[position]:
            continue
        end_s += job.duration_s
        while end_s > job.deadline_s and longest_first:
            minus_duration_s, dropped = heapq.heappop(longest_first)
            end_s += minus_duration_s
            is_chosen[dropped] = False
