"""Waiting prefills that can still be on time. Pure: durations and deadlines in, a split out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
