"""Waiting prefills that can still be on time. Pure: durations and deadlines in, a split out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting prefill: its duration including the switch, and its deadline.

    Times are seconds, deadlines on the clock of ``now_s``. Raises ValueError for a negative or
    infinite duration, and for a deadline that is not a number.
    """

    job_id: str
    duration_s: float
    deadline_s: float

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
    far. Optimal in number for jobs that are all ready at ``now_s`` and run one after the other; O(n
    log n). Prism, algorithm 2, applies the algorithm to the prefills waiting for one GPU.
    """
    by_deadline = sorted(jobs, key=lambda job: (job.deadline_s, job.duration_s))
    longest_first: list[tuple[float, int]] = []  # (-duration, position)
    is_late = [False] * len(by_deadline)
    end_s = now_s
    for position, job in enumerate(by_deadline):
        heapq.heappush(longest_first, (-job.duration_s, position))
        end_s += job.duration_s
        if end_s > job.deadline_s:
            minus_duration_s, dropped = heapq.heappop(longest_first)
            end_s += minus_duration_s
            is_late[dropped] = True
    return Admission(
        on_time=tuple(job for job, late in zip(by_deadline, is_late, strict=True) if not late),
        late=tuple(job for job, late in zip(by_deadline, is_late, strict=True) if late),
    )
