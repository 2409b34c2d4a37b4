"""Order of the queued prefills of a model: on-time requests by deadline, then late requests.

Prism's algorithm 2 within one model. While all queued requests can be on time, all are sent at
once. Otherwise as many first tokens as possible are kept on time: the other requests are deferred,
and the device gets only its next prefills, so that a request that arrives later can precede.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.state import HEAD_START, Batch, DeviceState, Request, Speed

# Largest share of a device's time that answers are assumed to take between prefills.
_MOST_DECODE_SHARE = 0.8


class PrefillOrder(NamedTuple):
    """Queued requests in order of execution; ``late`` requests cannot be on time."""

    on_time: Sequence[Request]
    late: Sequence[Request]


def prefill_order(
    queued: Collection[Request], prefill_s: float, speed: Speed, start_s: float, factor: float = 1.0
) -> PrefillOrder:
    """Return the order of a model's queued requests, if the first prefill begins at ``start_s``.

    ``prefill_s``: sum of the queued prefills; ``factor``: seconds until a prefill has ended, per
    second of prefill.
    """
    if start_s + factor * prefill_s <= min((one.next_deadline_s for one in queued), default=0.0):
        return PrefillOrder(list(queued), ())
    expired: list[Request] = []
    jobs: list[Job] = []
    by_id: dict[str, Request] = {}
    for one in queued:
        deadline_s = one.next_deadline_s
        if deadline_s < start_s:
            expired.append(one)
            continue
        by_id[one.id] = one
        jobs.append(_job(one, deadline_s, speed, factor))
    admission = most_on_time(jobs, start_s)
    late = [by_id[job.job_id] for job in admission.late]
    on_time = [by_id[job.job_id] for job in admission.on_time]
    if len({one.priority for one in on_time}) > 1:
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
    """Return the deadlines of on-time requests and of late ones, and the seconds of the on-time
    prefills.

    ``deadlines_s`` are those of ``requests``; requests whose next token was due before
    ``expired_at_s`` are left out. The first prefill begins at ``start_s``.
    """
    on_time_s: list[float] = []
    jobs: list[Job] = []
    sent_s = 0.0
    for one, deadline_s in zip(requests, deadlines_s, strict=True):
        if deadline_s < expired_at_s:
            continue
        if one.phase is RequestPhase.QUEUED:
            jobs.append(_job(one, deadline_s, speed))
            continue
        on_time_s.append(deadline_s)
        if one.phase is not RequestPhase.DECODING:
            sent_s += speed.costs.prefill_s(one.prefill_tokens)
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
