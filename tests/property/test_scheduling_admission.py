"""Moore-Hodgson against trying every set of jobs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, strategies as st

from gpupoold.scheduling.admission import Job, most_on_time

NOW = st.integers(0, 20)


def jobs_of(durations: st.SearchStrategy[float], max_size: int) -> st.SearchStrategy[list[Job]]:
    pairs = st.lists(st.tuples(durations, st.integers(0, 40)), max_size=max_size)
    return pairs.map(lambda all_: [Job(str(i), s, due) for i, (s, due) in enumerate(all_)])


def all_on_time(jobs: tuple[Job, ...], now_s: float, tolerance_s: float = 0.0) -> bool:
    """Return whether the jobs are on time in order of deadline, which is the best order for a
    set."""
    end_s = now_s
    for job in sorted(jobs, key=lambda job: job.deadline_s):
        end_s += job.duration_s
        if end_s > job.deadline_s + tolerance_s:
            return False
    return True


def most_by_trying(jobs: list[Job], now_s: float) -> int:
    return max(
        num
        for num in range(len(jobs) + 1)
        if any(all_on_time(chosen, now_s) for chosen in combinations(jobs, num))
    )


@given(jobs_of(st.integers(0, 12), max_size=9), NOW)
def test_no_set_of_jobs_on_time_is_larger(jobs: list[Job], now_s: int) -> None:
    assert len(most_on_time(jobs, now_s).on_time) == most_by_trying(jobs, now_s)


@given(jobs_of(st.floats(0, 12), max_size=40), NOW)
def test_a_split_of_the_jobs_that_keeps_its_word(jobs: list[Job], now_s: int) -> None:
    admission = most_on_time(jobs, now_s)
    assert sorted(admission.order, key=lambda job: int(job.job_id)) == jobs
    assert all_on_time(admission.on_time, now_s, tolerance_s=1e-9)
    deadlines = [job.deadline_s for job in admission.on_time]
    assert deadlines == sorted(deadlines)


@given(jobs_of(st.integers(0, 12), max_size=12), NOW)
def test_none_of_the_late_could_be_added(jobs: list[Job], now_s: int) -> None:
    admission = most_on_time(jobs, now_s)
    for job in admission.late:
        assert not all_on_time((*admission.on_time, job), now_s)


@given(jobs_of(st.integers(0, 12), max_size=12), st.lists(st.integers(0, 2), min_size=12), NOW)
def test_no_job_is_late_for_one_of_lower_priority(
    jobs: list[Job], priorities: list[int], now_s: int
) -> None:
    jobs = [replace(job, priority=one) for job, one in zip(jobs, priorities, strict=False)]
    admission = most_on_time(jobs, now_s)
    assert all_on_time(admission.on_time, now_s)
    for least in range(3):
        urgent = [job for job in jobs if job.priority >= least]
        among_urgent = most_on_time(urgent, now_s).on_time
        assert among_urgent == tuple(j for j in admission.on_time if j.priority >= least)
