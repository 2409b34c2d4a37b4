"""Which prefills can be on time: small cases by hand."""

from __future__ import annotations

import math

import pytest

from gpupoold.scheduling.admission import Job, most_on_time, on_time_ids, prefill_job


def ids(jobs: tuple[Job, ...]) -> str:
    return "".join(job.job_id for job in jobs)


def test_worked_by_hand() -> None:
    """In order of deadline: h is late at once and the longest; g is late, and f the longest."""
    durations = dict(zip("abcdefgh", (10, 6, 3, 1, 4, 8, 7, 6), strict=True))
    deadlines = (35, 20, 11, 8, 6, 25, 28, 9)
    jobs = [Job(n, s, due) for (n, s), due in zip(durations.items(), deadlines, strict=True)]
    admission = most_on_time(jobs)
    assert ids(admission.on_time) == "edcbga"
    assert ids(admission.late) == "hf"
    assert ids(admission.order) == "edcbgahf"


def test_the_longest_goes_not_the_last() -> None:
    jobs = [Job("a", 5, 5), Job("b", 1, 6), Job("c", 1, 6.5)]
    assert ids(most_on_time(jobs).on_time) == "bc"
    assert ids(most_on_time(jobs).late) == "a"


def test_a_deadline_met_just_in_time_is_met() -> None:
    assert on_time_ids([Job("a", 2, 5)], now_s=3.0) == {"a"}
    assert on_time_ids([Job("a", 2, 5)], now_s=3.001) == frozenset()


def test_hopeless_jobs_keep_nobody_waiting() -> None:
    jobs = [Job("old", 3, 1), Job("long", 9, 4), Job("new", 2, 5), Job("idle", 1, math.inf)]
    admission = most_on_time(jobs, now_s=2.0)
    assert ids(admission.on_time) == "new" + "idle"
    assert ids(admission.late) == "old" + "long"


def test_nothing_waits() -> None:
    assert most_on_time([]).order == ()


def test_prefill_job() -> None:
    job = prefill_job("r", 100.0, 10.0, 7_000, 14_000.0, switch_s=0.8)
    assert job.duration_s == pytest.approx(1.3)
    assert (job.job_id, job.deadline_s) == ("r", 110.0)
    assert on_time_ids([job], now_s=108.0) == {"r"}
    assert on_time_ids([job], now_s=109.0) == frozenset()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Job("a", -1, 1),
        lambda: Job("a", math.nan, 1),
        lambda: Job("a", math.inf, math.inf),
        lambda: Job("a", 1, math.nan),
        lambda: prefill_job("a", 0, 1, 1, 0),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()
