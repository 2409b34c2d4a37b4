"""Placement of requests on the fewest workers within targets (Aladdin, section 4.2).

Best fit with several capacities: KV memory over the rest of every answer, the time between tokens,
and, on workers that also prefill, the time to first token and the lead of the running answers.
Pure; a worker is a device with the model, or several of one tensor parallel group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Constraint(StrEnum):
    """A capacity that a placement can exceed, with the letters of the paper's program."""

    TBT = "tbt"  # (b) context and batch size make steps too slow
    TTFT = "ttft"  # (c) prefills placed together take too long
    LEAD = "lead"  # (d) running answers would fall behind during those prefills
    KV = "kv"  # (e) at some later step the KV of all does not fit


@dataclass(frozen=True, slots=True)
class PackedRequest:
    """A request for placement; lengths in tokens.

    ``num_output_tokens`` exist so far, made in ``decode_s``; a request without output is new and
    needs prefill.
    """

    request_id: str
    num_prompt_tokens: int
    predicted_output_tokens: float
    num_output_tokens: int = 0
    decode_s: float = 0.0

    @property
    def is_new(self) -> bool:
        """True if the prefill is still to come."""
        return self.num_output_tokens == 0

    @property
    def num_context_tokens(self) -> int:
        """Tokens of KV that the request holds now, or after the prefill."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def final_output_tokens(self) -> float:
        """Expected output length: the prediction, unless the output is longer already."""
        return max(self.predicted_output_tokens, self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class KvCost:
    """KV of a request: ``bytes_per_token * tokens + bytes_per_request`` (equation 1)."""

    bytes_per_token: float
    bytes_per_request: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a decode step: ``context_s * context + sequence_s * batch + base_s`` (eq. 3).

    ``context_s`` is per token of context of the whole batch, ``sequence_s`` per request.
    """

    context_s: float
    sequence_s: float
    base_s: float

    def __post_init__(self) -> None:
        if not self.context_s > 0 or self.sequence_s < 0 or self.base_s < 0:
            raise ValueError(f"a step takes longer with more context, and never < 0 s; got {self}")


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a prefill, ``token_s * tokens + base_s`` (equation 2), and its target."""

    token_s: float
    base_s: float
    ttft_s: float

    def predict_s(self, num_tokens: int) -> float:
        """Return the seconds of a prefill of ``num_tokens``; 0 without any."""
        return self.token_s * num_tokens + self.base_s if num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Capacity of each worker; all workers are equal.

    ``gamma`` (0 to 1) is the share of an answer at which a step must still be within ``tbt_s``;
    ``theta`` (0 to 1) holds some of (b) and (d) back for errors of the predictions. Without
    ``prefill`` the workers only decode, and (c) and (d) do not bind.
    """

    kv_bytes: float
    kv: KvCost
    step: StepCost | None = None
    tbt_s: float = math.inf
    prefill: PrefillCost | None = None
    gamma: float = 0.5
    theta: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 < self.theta <= 1):
            raise ValueError(f"need 0 <= gamma <= 1 and 0 < theta <= 1; got {self}")

    def max_context_tokens(self, batch_size: int) -> float:
        """Return the context at which a batch's step takes exactly ``tbt_s`` (equation 4).

        Unlimited for one request, whose step time hardly depends on its context.
        """
        if self.step is None or batch_size <= 1:
            return math.inf
        spare_s = self.tbt_s - self.step.base_s - self.step.sequence_s * batch_size
        return spare_s / self.step.context_s


Worker = tuple[PackedRequest, ...]
# A smaller gain, in seconds, is rounding.
_LEAST_GAIN_S = 1e-12


def peak_kv_bytes(worker: Iterable[PackedRequest], kv: KvCost) -> float:
    """Return the peak KV of the requests until all have ended; O(n log n).

    Each request grows by a token a step and frees its KV at its end, so the peak is at the last
    step of some request.
    """
    longest_first = sorted(
        ((r.final_output_tokens - r.num_output_tokens, r.num_context_tokens) for r in worker),
        reverse=True,
    )
    peak_bytes, num_context_tokens = 0.0, 0
    for num_alive, (num_steps, num_tokens) in enumerate(longest_first, 1):
        num_context_tokens += num_tokens
        held_tokens = num_context_tokens + num_alive * num_steps
        held_bytes = kv.bytes_per_token * held_tokens + kv.bytes_per_request * num_alive
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def weighted_context_tokens(worker: Iterable[PackedRequest], gamma: float) -> float:
    """Return ``sum(prompt + gamma * output)``: the context at a share ``gamma`` of the answers."""
    return math.fsum(r.num_prompt_tokens + gamma * r.final_output_tokens for r in worker)


def load_norm(worker: Worker, gamma: float = 0.5) -> float:
    """Return the load for ordering workers: the L2 norm of batch size and weighted context."""
    return math.hypot(len(worker), weighted_context_tokens(worker, gamma))


def violations(worker: Worker, limits: WorkerLimits) -> frozenset[Constraint]:
    """Return the capacities that one worker's requests exceed together; empty if all fit."""
    broken = set()
    context_tokens = weighted_context_tokens(worker, limits.gamma)
    if context_tokens > limits.theta * limits.max_context_tokens(len(worker)):
        broken.add(Constraint.TBT)
    if peak_kv_bytes(worker, limits.kv) > limits.kv_bytes:
        broken.add(Constraint.KV)
    if limits.prefill is not None:
        broken |= _prefill_violations(worker, limits, limits.prefill)
    return frozenset(broken)


def _prefill_violations(
    worker: Worker, limits: WorkerLimits, prefill: PrefillCost
) -> set[Constraint]:
    prefill_s = prefill.predict_s(sum(r.num_prompt_tokens for r in worker if r.is_new))
    if not prefill_s:
        return set()
    broken = set()
    if prefill_s > prefill.ttft_s:
        broken.add(Constraint.TTFT)
    leads_s = [limits.tbt_s * r.num_output_tokens - r.decode_s for r in worker if not r.is_new]
    if leads_s and prefill_s > limits.theta * min(leads_s):
        broken.add(Constraint.LEAD)
    return broken


def best_fit(request: PackedRequest, workers: Sequence[Worker], limits: WorkerLimits) -> int | None:
    """Return the most loaded worker that can take the request; None to open another (algorithm
    1).
    """
    most_loaded_first = sorted(
        range(len(workers)), key=lambda i: (-load_norm(workers[i], limits.gamma), i)
    )
    for index in most_loaded_first:
        if not violations((*workers[index], request), limits):
            return index
    return None


def shortest_queue(workers: Sequence[Worker]) -> int:
    """Return the worker with the fewest requests, the first among equals: the usual baseline.

    Raises ValueError without workers.
    """
    if not workers:
        raise ValueError("there is no worker to join; open one first")
    return min(range(len(workers)), key=lambda i: (len(workers[i]), i))


def pack_best_fit(
    requests: Iterable[PackedRequest], limits: WorkerLimits, workers: Sequence[Worker] = ()
) -> tuple[Worker, ...]:
    """Place requests one by one by best fit on ``workers``, opening further workers as needed.

    A request too large for an empty worker gets a separate worker; ``violations`` names the reason.
    """
    packed = list(workers)
    for request in requests:
        index = best_fit(request, packed, limits)
        if index is None:
            packed.append((request,))
        else:
            packed[index] = (*packed[index], request)
    return tuple(packed)


def pack_shortest_queue(
    requests: Iterable[PackedRequest], workers: Sequence[Worker]
) -> tuple[Worker, ...]:
    """Place requests one by one on the shortest queue, regardless of fit."""
    packed = list(workers)
    for request in requests:
        index = shortest_queue(packed)
        packed[index] = (*packed[index], request)
    return tuple(packed)


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Deviation of one worker's load from the prediction (algorithm 2).

    A positive value means more than predicted, in output tokens and in running requests.
    """

    num_output_tokens: float = 0.0
    num_requests: int = 0

    def step_error_s(self, step: StepCost) -> float:
        """Return the effect of the error on a decode step, in seconds (equation 3)."""
        return step.context_s * self.num_output_tokens + step.sequence_s * self.num_requests

    def with_request(self, request: PackedRequest, sign: int) -> PredictionError:
        """Return the error if a request is added to (``sign`` 1) or removed from (-1) the plan."""
        return PredictionError(
            self.num_output_tokens + sign * request.predicted_output_tokens,
            self.num_requests + sign,
        )


def prediction_error(
    outlived: Iterable[PackedRequest], ended_early: Iterable[tuple[float, int]]
) -> PredictionError:
    """Return one worker's error from the fate of its requests (algorithm 2, lines 4 to 13).

    ``outlived``: running past the first prediction, with the latest prediction; each counts as one
    request more. ``ended_early``: (predicted, real) output tokens of requests that ended before
    their prediction; each counts as one request less.
    """
    more = [request.predicted_output_tokens for request in outlived]
    less = [predicted - real for predicted, real in ended_early if real < predicted]
    return PredictionError(math.fsum(more) - math.fsum(less), len(more) - len(less))


@dataclass(frozen=True, slots=True)
class Move:
    """Place a new request on ``target`` instead of ``source`` (indices of workers)."""

    request_id: str
    source: int
    target: int


def rebalance(
    workers: Sequence[Worker], errors: Sequence[PredictionError], limits: WorkerLimits
) -> tuple[Move, ...]:
    """Move new requests from workers with more load than predicted to workers with less.

    Minimises the sum over workers of the distance of their error line from the origin, which for
    equal workers is the sum of ``|step error|`` (algorithm 2, line 23). The paper leaves the search
    open; this function takes the best single move until none helps. A request moves at most once,
    only while new, and only to a worker where it fits. Raises ValueError without a step cost.
    """
    if limits.step is None:
        raise ValueError("rebalancing weighs errors by the step cost; give limits.step")
    placed, left = [list(worker) for worker in workers], list(errors)
    migrations: list[Move] = []
    moved: set[str] = set()
    while (best := _best_move(placed, left, limits, limits.step, moved)) is not None:
        request, source, target = best
        placed[source].remove(request)
        placed[target].append(request)
        left[source] = left[source].with_request(request, -1)
        left[target] = left[target].with_request(request, +1)
        moved.add(request.request_id)
        migrations.append(Move(request.request_id, source, target))
    return tuple(migrations)


def _best_move(
    placed: Sequence[Sequence[PackedRequest]],
    errors: Sequence[PredictionError],
    limits: WorkerLimits,
    step: StepCost,
    moved: set[str],
) -> tuple[PackedRequest, int, int] | None:
    """Return the move that lowers the sum of errors most, the first among equals."""
    best, best_gain_s = None, _LEAST_GAIN_S
    for source, worker in enumerate(placed):
        movable = [r for r in worker if r.is_new and r.request_id not in moved]
        for request in movable if errors[source].step_error_s(step) > 0 else ():
            for target in range(len(placed)):
                if target == source:
                    continue
                gain_s = _gain_s(request, errors[source], errors[target], step)
                if gain_s > best_gain_s and not violations((*placed[target], request), limits):
                    best, best_gain_s = (request, source, target), gain_s
    return best


def _gain_s(
    request: PackedRequest, source: PredictionError, target: PredictionError, step: StepCost
) -> float:
    before_s = abs(source.step_error_s(step)) + abs(target.step_error_s(step))
    source, target = source.with_request(request, -1), target.with_request(request, +1)
    return before_s - abs(source.step_error_s(step)) - abs(target.step_error_s(step))
