"""Packing of any requests: limits hold, peaks are true, moves help."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gpupoold.scheduling.packing import (
    KvCost,
    PackedRequest,
    PredictionError,
    PrefillCost,
    StepCost,
    Worker,
    WorkerLimits,
    best_fit,
    pack_best_fit,
    pack_shortest_queue,
    peak_kv_bytes,
    rebalance,
    violations,
)

KV = KvCost(2, 5)
STEP = StepCost(context_s=1e-4, sequence_s=1e-3, base_s=0.01)
LIMITS = WorkerLimits(400, KV, STEP, tbt_s=0.05, prefill=PrefillCost(1e-3, 0.0, ttft_s=0.15))
SIZES = st.integers(1, 60)


def requests(max_size: int, max_output: int = 0) -> st.SearchStrategy[list[PackedRequest]]:
    one = st.tuples(SIZES, SIZES, st.integers(0, max_output), st.floats(0, 2))
    return st.lists(one, max_size=max_size).map(
        lambda rows: [
            PackedRequest(str(i), prompt, predicted, output, decode_s if output else 0.0)
            for i, (prompt, predicted, output, decode_s) in enumerate(rows)
        ]
    )


def peak_step_by_step(worker: Worker) -> float:
    """The paper's vectors, added up: every request holds KV until its last step."""
    steps = max((int(r.final_output_tokens) for r in worker), default=0)
    return max(
        sum(
            KV.bytes_per_token * (r.num_context_tokens + step) + KV.bytes_per_request
            for r in worker
            if step <= r.final_output_tokens - r.num_output_tokens
        )
        for step in range(steps + 1)
    )


@given(requests(8, max_output=80))
def test_peak_is_that_of_the_vectors(worker: list[PackedRequest]) -> None:
    assert peak_kv_bytes(worker, KV) == peak_step_by_step(tuple(worker))


@given(requests(12))
def test_best_fit_keeps_the_limits_and_everybody(arrivals: list[PackedRequest]) -> None:
    packed = pack_best_fit(arrivals, LIMITS)
    assert sorted(int(r.request_id) for worker in packed for r in worker) == [
        int(r.request_id) for r in arrivals
    ]
    for worker in packed:
        assert len(worker) == 1 or not violations(worker, LIMITS)


@given(requests(12))
def test_a_new_worker_only_if_no_other_fits(arrivals: list[PackedRequest]) -> None:
    packed: tuple[Worker, ...] = ()
    for request in arrivals:
        after = pack_best_fit([request], LIMITS, packed)
        if len(after) > len(packed):
            assert all(violations((*worker, request), LIMITS) for worker in packed)
            assert best_fit(request, packed, LIMITS) is None
        packed = after


@given(requests(12), st.integers(1, 4))
def test_shortest_queues_differ_by_one_at_most(arrivals: list[PackedRequest], num: int) -> None:
    sizes = [len(worker) for worker in pack_shortest_queue(arrivals, [()] * num)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == len(arrivals)


@given(
    st.lists(requests(4, max_output=2), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-200, 200), st.integers(-3, 3)), min_size=4, max_size=4),
)
def test_every_move_helps(
    rows: list[list[PackedRequest]], raw_errors: list[tuple[int, int]]
) -> None:
    workers = [
        tuple(
            PackedRequest(
                f"{i}.{r.request_id}",
                r.num_prompt_tokens,
                r.predicted_output_tokens,
                r.num_output_tokens,
                r.decode_s,
            )
            for r in row
        )
        for i, row in enumerate(rows)
    ]
    errors = [PredictionError(*raw_errors[i]) for i in range(len(workers))]
    by_id = {r.request_id: r for worker in workers for r in worker}
    before_s = sum(abs(error.step_error_s(STEP)) for error in errors)
    migrations = rebalance(workers, errors, LIMITS)
    assert len({move.request_id for move in migrations}) == len(migrations)
    total_s = sum(error.step_error_s(STEP) for error in errors)
    for move in migrations:
        request = by_id[move.request_id]
        assert request.is_new
        errors[move.source] = errors[move.source].with_request(request, -1)
        errors[move.target] = errors[move.target].with_request(request, +1)
        after_s = sum(abs(error.step_error_s(STEP)) for error in errors)
        assert after_s < before_s
        before_s = after_s
    assert sum(error.step_error_s(STEP) for error in errors) == pytest.approx(total_s, abs=1e-9)
