"""Bytes and rates of a download, on a clock of the test."""

from __future__ import annotations

from gpupoold.checkpoints.fetcher import DownloadProgress


class Reports:
    def __init__(self, total_bytes: int) -> None:
        self.now_s = 100.0
        self.seen: list[tuple[int, int, float | None]] = []
        self.progress = DownloadProgress(
            total_bytes, lambda *report: self.seen.append(report), clock=lambda: self.now_s
        )

    def receive(self, num_bytes: int, after_s: float) -> None:
        self.now_s += after_s
        self.progress.received(num_bytes)


def test_the_rate_is_of_bytes_that_arrive_now() -> None:
    reports = Reports(10_000)
    reports.progress.found(5_000)
    for _ in range(4):
        reports.receive(500, 1.0)
    assert reports.seen[0] == (5_000, 10_000, None)
    assert reports.seen[-1] == (7_000, 10_000, 500.0)


def test_the_rate_forgets_what_was_long_ago() -> None:
    reports = Reports(1_000_000)
    reports.progress.found(0)
    for _ in range(20):
        reports.receive(1000, 1.0)
    for _ in range(30):
        reports.receive(10, 1.0)
    rate = reports.seen[-1][2]
    assert rate is not None
    assert 9.0 <= rate <= 11.0


def test_a_part_that_starts_over_takes_bytes_back_but_no_rate() -> None:
    reports = Reports(1000)
    reports.receive(400, 1.0)
    reports.receive(400, 1.0)
    reports.now_s += 1.0
    reports.progress.found(-800)
    assert reports.seen[-1][0] == 0
    assert (reports.seen[-1][2] or 0.0) >= 0.0


def test_reports_are_rare_but_the_last_one_comes() -> None:
    reports = Reports(1000)
    for _ in range(1000):
        reports.receive(1, 0.001)
    assert len(reports.seen) < 20
    assert reports.seen[-1][:2] == (1000, 1000)
