"""A bucket lets no more begin than it should, in whatever window one looks."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gpupoold.access.rates import Bucket

PER_MINUTE = st.integers(1, 10_000)
GAPS_S = st.lists(st.floats(0, 120) | st.just(0.0), min_size=1, max_size=60)
# A clock's float rounds: a level that is short of 1 by this much may pass.
ROUNDING = 1e-6


@given(PER_MINUTE, GAPS_S)
def test_requests_in_any_window(per_minute: int, gaps_s: list[float]) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    begun_s: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        # Each tries until it is refused, or thrice.
        for _ in range(3):
            if bucket.wait_s(1, now_s) == 0:
                bucket.take(1, now_s)
                begun_s.append(now_s)
    for first, start_s in enumerate(begun_s):
        for last in range(first, len(begun_s)):
            allowed = per_minute * (1 + (begun_s[last] - start_s) / 60)
            assert last - first + 1 <= allowed + ROUNDING


@given(PER_MINUTE, GAPS_S, st.lists(st.integers(0, 50_000), min_size=60, max_size=60))
def test_whoever_uses_more_than_was_there_pays_before_the_next(
    per_minute: int, gaps_s: list[float], amounts: list[int]
) -> None:
    """All but the last that was begun in a window fit into it."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    begun: list[tuple[float, int]] = []
    for gap_s, amount in zip(gaps_s, amounts, strict=False):
        now_s += gap_s
        if bucket.wait_s(1, now_s) == 0:
            bucket.take(amount, now_s)
            begun.append((now_s, amount))
    for first, (start_s, _) in enumerate(begun):
        for last in range(first + 1, len(begun)):
            used = sum(amount for _, amount in begun[first:last])
            allowed = per_minute * (1 + (begun[last][0] - start_s) / 60)
            assert used <= allowed * (1 + ROUNDING) + ROUNDING


@given(PER_MINUTE, GAPS_S)
def test_who_waits_as_long_as_he_is_told_is_let_through(
    per_minute: int, gaps_s: list[float]
) -> None:
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = bucket.wait_s(1, now_s)
        bucket_wait = bucket.wait_s(1, now_s + wait_s * (1 + ROUNDING) + ROUNDING)
        assert bucket_wait == 0
        now_s += wait_s * (1 + ROUNDING) + ROUNDING
        bucket.take(per_minute / 3, now_s)
