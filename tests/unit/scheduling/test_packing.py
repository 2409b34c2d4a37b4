"""Placement by best fit against joining the shortest queue (check C18), and rebalancing."""

from __future__ import annotations

import itertools
import math

import pytest

from gpupoold.scheduling.packing import (
    Constraint,
    KvCost,
    Move,
    PackedRequest,
    PredictionError,
    PrefillCost,
    StepCost,
    Worker,
    WorkerLimits,
    best_fit,
    load_norm,
    pack_best_fit,
    pack_shortest_queue,
    peak_kv_bytes,
    prediction_error,
    rebalance,
    shortest_queue,
    violations,
)

ONE_EACH = KvCost(bytes_per_token=1)
CAPACITY = 9
LIMITS = WorkerLimits(kv_bytes=CAPACITY, kv=ONE_EACH)


def long_prompt(name: str) -> PackedRequest:
    return PackedRequest(name, num_prompt_tokens=4, predicted_output_tokens=1)


def long_output(name: str) -> PackedRequest:
    return PackedRequest(name, num_prompt_tokens=1, predicted_output_tokens=4)


ARRIVALS = [long_prompt("p1"), long_output("o1"), long_prompt("p2"), long_output("o2")]


def peaks(workers: tuple[Worker, ...]) -> list[float]:
    return [peak_kv_bytes(worker, ONE_EACH) for worker in workers]


def test_c18_shortest_queue_overflows() -> None:
    """Aladdin, figure 4: both long prompts on one worker, both long answers on the other."""
    packed = pack_shortest_queue(ARRIVALS, [(), ()])
    assert peaks(packed) == [10, 10]
    assert all(violations(worker, LIMITS) == {Constraint.KV} for worker in packed)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_c18_best_fit_finds_the_best_mix_in_any_order(order: tuple[int, ...]) -> None:
    packed = pack_best_fit([ARRIVALS[i] for i in order], LIMITS)
    assert peaks(packed) == [7, 7]


def test_c18_no_other_lengths_give_the_figures_numbers() -> None:
    """The text names only capacity and peaks; these lengths are the only ones that fit."""
    found = []
    for prompt in itertools.product(range(1, 6), repeat=2):
        for output in itertools.product(range(1, 6), repeat=2):
            first, second = PackedRequest("a", *prompt), PackedRequest("b", *output)
            alike = peaks(((first, first), (second, second)))
            if alike == [10, 10] and peaks(((first, second),)) == [7] and prompt > output:
                found.append((prompt, output))
    assert found == [((4, 1), (1, 4))]


def test_peak_of_running_requests() -> None:
    running = PackedRequest("r", 10, 30, num_output_tokens=20)  # 10 steps to go from 30 tokens
    new = PackedRequest("n", 5, 2)
    assert peak_kv_bytes([running], ONE_EACH) == 40
    assert peak_kv_bytes([running, new], ONE_EACH) == 40  # 32 + 7 after two steps
    assert peak_kv_bytes([running, new, new], ONE_EACH) == 46
    assert peak_kv_bytes([running], KvCost(2, 7)) == 87
    assert peak_kv_bytes([], ONE_EACH) == 0


def test_an_answer_longer_than_predicted_holds_what_it_has() -> None:
    assert peak_kv_bytes([PackedRequest("r", 10, 5, num_output_tokens=8)], ONE_EACH) == 18


STEP = StepCost(context_s=1e-5, sequence_s=1e-3, base_s=0.02)


def test_context_limit() -> None:
    """Equation 4: at the limit a step of the batch takes just the target."""
    limits = WorkerLimits(math.inf, ONE_EACH, STEP, tbt_s=0.1)
    assert limits.max_context_tokens(30) == pytest.approx(5_000)
    step_s = STEP.context_s * 5_000 + STEP.sequence_s * 30 + STEP.base_s
    assert step_s == pytest.approx(0.1)
    assert limits.max_context_tokens(1) == math.inf
    assert limits.max_context_tokens(90) < 0


@pytest.mark.parametrize(
    ("gamma", "theta", "fits"),
    [(0.0, 1.0, True), (0.5, 1.0, True), (1.0, 1.0, False), (0.5, 0.5, False)],
)
def test_target_between_tokens(gamma: float, theta: float, fits: bool) -> None:
    """Two requests of 2000 + 3000 tokens against a limit of 7800."""
    limits = WorkerLimits(math.inf, ONE_EACH, STEP, tbt_s=0.1, gamma=gamma, theta=theta)
    worker = (PackedRequest("a", 2000, 3000), PackedRequest("b", 2000, 3000))
    assert limits.max_context_tokens(2) == pytest.approx(7_800)
    assert (not violations(worker, limits)) is fits
    assert violations(worker, limits) <= {Constraint.TBT}


def test_prefill_constraints() -> None:
    prefill = PrefillCost(token_s=1e-4, base_s=0.01, ttft_s=0.3)
    limits = WorkerLimits(math.inf, ONE_EACH, tbt_s=0.1, prefill=prefill)
    ahead = PackedRequest("r", 100, 100, num_output_tokens=10, decode_s=0.5)  # leads by 0.5 s
    close = PackedRequest("r", 100, 100, num_output_tokens=10, decode_s=0.9)  # by 0.1 s
    new = PackedRequest("n", 2000, 10)  # 0.21 s
    assert not violations((ahead, new), limits)
    assert violations((close, new), limits) == {Constraint.LEAD}
    assert violations((new, new), limits) == {Constraint.TTFT}
    assert violations((close, new, new), limits) == {Constraint.LEAD, Constraint.TTFT}
    assert not violations((close,), limits)  # nothing new: nothing waits
    decode_only = WorkerLimits(math.inf, ONE_EACH, tbt_s=0.1)
    assert not violations((close, new, new), decode_only)


def test_load_norm() -> None:
    assert (
        load_norm((PackedRequest("a", 3, 2), PackedRequest("b", 0, 0), PackedRequest("c", 0, 0)))
        == 5
    )
    assert load_norm(()) == 0


def test_best_fit_prefers_the_most_loaded_that_fits() -> None:
    workers: list[Worker] = [(), (PackedRequest("a", 3, 2),), (PackedRequest("b", 7, 2),)]
    assert best_fit(PackedRequest("n", 2, 2), workers, LIMITS) == 1
    assert best_fit(PackedRequest("n", 7, 2), workers, LIMITS) == 0
    assert best_fit(PackedRequest("n", 9, 2), workers, LIMITS) is None
    assert shortest_queue(workers) == 0


def test_a_request_too_large_for_any_gets_a_worker_of_its_own() -> None:
    packed = pack_best_fit([PackedRequest("n", 20, 1), PackedRequest("m", 2, 1)], LIMITS)
    assert [len(worker) for worker in packed] == [1, 1]
    assert violations(packed[0], LIMITS) == {Constraint.KV}


def test_prediction_error() -> None:
    """Two answers go on for 50 and 70 tokens more than planned; one ended 30 early."""
    outlived = [PackedRequest("a", 1, 50, 40), PackedRequest("b", 1, 70, 60)]
    error = prediction_error(outlived, [(100, 70), (100, 100)])
    assert error == PredictionError(90, 1)
    assert error.step_error_s(STEP) == pytest.approx(90e-5 + 1e-3)
    assert prediction_error([], []) == PredictionError()


REBALANCED = WorkerLimits(10_000, ONE_EACH, STEP, tbt_s=1.0)


def test_rebalance_moves_new_requests_to_where_less_came() -> None:
    running = PackedRequest("r", 100, 100, num_output_tokens=50)
    workers: list[Worker] = [
        (running, PackedRequest("n1", 10, 100), PackedRequest("n2", 10, 40)),
        (),
    ]
    errors = [PredictionError(100, 1), PredictionError(-100, -1)]
    assert rebalance(workers, errors, REBALANCED) == (Move("n1", 0, 1),)


def test_rebalance_without_errors_leaves_all_in_place() -> None:
    workers: list[Worker] = [(PackedRequest("n1", 10, 100), PackedRequest("n2", 10, 40)), ()]
    assert rebalance(workers, [PredictionError(), PredictionError()], REBALANCED) == ()


def test_rebalance_keeps_to_the_limits() -> None:
    tight = WorkerLimits(115, ONE_EACH, STEP, tbt_s=1.0)
    workers: list[Worker] = [(PackedRequest("n1", 10, 100),), (PackedRequest("r", 50, 50, 40),)]
    errors = [PredictionError(100, 1), PredictionError(-100, -1)]
    assert rebalance(workers, errors, REBALANCED) == (Move("n1", 0, 1),)
    assert rebalance(workers, errors, tight) == ()


def test_rebalance_leaves_running_requests() -> None:
    workers: list[Worker] = [(PackedRequest("r", 10, 100, num_output_tokens=1),), ()]
    errors = [PredictionError(100, 1), PredictionError(-100, -1)]
    assert rebalance(workers, errors, REBALANCED) == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda: shortest_queue([]),
        lambda: StepCost(0, 1, 1),
        lambda: WorkerLimits(1, ONE_EACH, gamma=1.5),
        lambda: WorkerLimits(1, ONE_EACH, theta=0),
        lambda: rebalance([()], [PredictionError()], LIMITS),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()
