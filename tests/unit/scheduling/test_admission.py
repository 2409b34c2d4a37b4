"""Which prefills can be on time: small cases by hand."""

from __future__ import annotations

import math

import pytest

from gpupoold.scheduling.admission import Job, most_on_time


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
    assert ids(most_on_time([Job("a", 2, 5)], now_s=3.0).on_time) == "a"
    assert ids(most_on_time([Job("a", 2, 5)], now_s=3.001).late) == "a"


def test_expired_jobs_keep_nobody_waiting() -> None:
    jobs = [Job("old", 3, 1), Job("long", 9, 4), Job("new", 2, 5), Job("idle", 1, math.inf)]
    admission = most_on_time(jobs, now_s=2.0)
    assert ids(admission.on_time) == "new" + "idle"
    assert ids(admission.late) == "old" + "long"


def test_nothing_waits() -> None:
    assert most_on_time([]).order == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda: Job("a", -1, 1),
        lambda: Job("a", math.nan, 1),
        lambda: Job("a", math.inf, math.inf),
        lambda: Job("a", 1, math.nan),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()
