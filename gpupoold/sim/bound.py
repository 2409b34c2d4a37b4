"""An upper bound on token attainment: no schedule of the workload on the box does better.

The bound holds for clairvoyant schedules too: memory is unlimited, a switch takes no time after the
first load of a model, and no request is bound to a device. Two relaxations are combined.

*A request alone.* Its first token comes at the earliest when its model has been loaded once (from
time 0) and its prompt has been prefilled, and each further token takes a decode step of a batch of
one. Tokens due earlier than that are late in every schedule.

*Capacity.* Let a token be *useful* if it is in time. The useful token ``k`` of request ``r`` is
made between the arrival of ``r`` and the token's deadline, in a step of the model's requests. The
step takes a fixed time, plus a time for each sequence and its context. All useful tokens of the
step belong to requests between arrival and last deadline. If at most ``n`` requests of the model
are so at one time between the arrival of ``r`` and the deadline of ``k``, then ``1/n`` of the fixed
time for each useful token is at most the fixed time of the step. Another division gives all of the
fixed time to requests of which no two have a step in common, those with the most tokens together.
Every mean of the two divisions holds as well; the best of three is taken. The time for the sequence
and the context comes on top. Of the prefill of ``r``, each of its ``f`` tokens that could be useful
gets a part of ``1/f``.

So the useful tokens with arrival and deadline in a window of ``s`` seconds take no more than ``s``
seconds of each device together. The most useful tokens of the window are those of the least work.
All other tokens of the window are late, and the late tokens of disjoint windows add up: dynamic
programming finds the windows that lose most. Work is rounded down, arrivals are rounded down, and
deadlines are rounded up to a grid.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupoold.latency.models import LatencyModel
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.workloads import SimRequest

_NUM_SLOTS = 64
# Classes of work per token: each 1.05 times the one before, from 1 us.
_LEAST_WORK_S, _CLASS_FACTOR = 1e-6, 1.05
# Parts of the fixed time that fall to requests without a common step; see above.
_ALONE_PARTS = (0.0, 0.5, 1.0)
# For rounding errors of sums of times, relative to the times.
_TOLERANCE = 1e-9


def attainment_bound(
    requests: Sequence[SimRequest], models: Mapping[str, SimModel], num_devices: int
) -> float | None:
    """Return the largest possible share of tokens in time; None without tokens.

    The simulated devices have the step times of ``models`` and prefill prompts one after the other,
    or in chunks.
    """
    num_tokens = sum(request.output_tokens for request in requests)
    if not num_tokens:
        return None
    by_model: defaultdict[str, list[SimRequest]] = defaultdict(list)
    for request in requests:
        by_model[request.model].append(request)
    tasks = [task for name, lives in by_model.items() for task in _tasks(lives, models[name])]
    num_possible = sum(task.last - task.first + 1 for task in tasks)
    end_s = max((task.due_s(task.last) for task in tasks), default=0.0)
    if end_s <= 0:
        return num_possible / num_tokens
    slot_s, lost = end_s / _NUM_SLOTS, 0.0
    pieces = [piece for task in tasks for piece in _pieces(task, slot_s)]
    for alone_part in _ALONE_PARTS:
        windows = _Windows(slot_s, num_devices)
        for piece in pieces:
            windows.add(piece, alone_part)
        lost = max(lost, windows.least_lost())
    return max(0.0, num_possible - lost) / num_tokens


@dataclass(frozen=True, slots=True)
class _BestSteps:
    """The parts of a model's step times, in seconds."""

    fixed_s: float
    sequence_s: float
    context_s: float

    @classmethod
    def of(cls, latency: LatencyModel) -> _BestSteps:
        """Split the time of a decode step, which is linear in sequences and context."""
        one_s, two_s = latency.decode_step_s(1, 0), latency.decode_step_s(2, 0)
        sequence_s = max(0.0, two_s - one_s)
        context_s = max(0.0, latency.decode_step_s(1, 10_000) - one_s) / 10_000
        return cls(max(0.0, one_s - sequence_s), sequence_s, context_s)


@dataclass(frozen=True, slots=True)
class _Task:
    """A request with the tokens ``first`` to ``last`` (from 0), which can be in time.

    ``prefill_s`` is the work of the prefill without the fixed part, which a step may share.
    """

    request: SimRequest
    ttft_s: float
    tbt_s: float
    steps: _BestSteps
    crowd: _Crowd
    prefill_s: float
    first: int
    last: int
    is_alone: bool

    def due_s(self, index: int) -> float:
        return self.request.arrival_s + self.ttft_s + index * self.tbt_s


class _Crowd:
    """The number of a model's requests that are between arrival and last deadline, over time."""

    def __init__(self, spans_s: Sequence[tuple[float, float]]) -> None:
        self._begins_s = sorted(begin_s for begin_s, _ in spans_s)
        ends_s = sorted(end_s for _, end_s in spans_s)
        # The number is largest right after an arrival.
        counts: list[int] = []
        num_ended = 0
        for index, begin_s in enumerate(self._begins_s):
            while ends_s[num_ended] < begin_s:
                num_ended += 1
            counts.append(index + 1 - num_ended)
        self._largest = [counts]  # entry k: the largest of 2^k counts from each index
        while (width := 1 << len(self._largest)) <= len(counts):
            last = self._largest[-1]
            half = width // 2
            self._largest.append(
                [max(last[i], last[i + half]) for i in range(len(counts) - width + 1)]
            )

    def largest(self, from_s: float, until_s: float) -> int:
        """Return the largest number in a period that begins with an arrival."""
        low = bisect_right(self._begins_s, from_s) - 1
        high = bisect_right(self._begins_s, until_s)
        level = (high - low).bit_length() - 1
        counts = self._largest[level]
        return max(counts[low], counts[high - (1 << level)])


def _tasks(requests: Sequence[SimRequest], model: SimModel) -> Iterator[_Task]:
    """Yield the requests of a model that can have tokens in time."""
    targets, latency = model.targets, model.latency
    steps = _BestSteps.of(latency)
    load_s = latency.switch_s(model.weight_bytes)
    spans_s = [
        (
            request.arrival_s,
            targets.deadline_s(request.arrival_s, max(0, request.output_tokens - 1)),
        )
        for request in requests
    ]
    crowd = _Crowd(spans_s)
    alone = _disjoint(spans_s, [request.output_tokens for request in requests])
    for index, one in enumerate(requests):
        prefill_s = latency.prefill_s([one.prompt_tokens]) - latency.prefill_s([0])
        ready_s = max(one.arrival_s, load_s) + max(0.0, prefill_s)
        spare_s = one.arrival_s + targets.ttft_s - ready_s
        in_time = _in_time(spare_s, targets.tbt_s, steps, one)
        if in_time is not None:
            first, last = in_time
            yield _Task(
                request=one,
                ttft_s=targets.ttft_s,
                tbt_s=targets.tbt_s,
                steps=steps,
                crowd=crowd,
                prefill_s=max(0.0, prefill_s),
                first=first,
                last=last,
                is_alone=index in alone,
            )


def _disjoint(spans_s: Sequence[tuple[float, float]], weights: Sequence[int]) -> set[int]:
    """Return the indices of spans without a common time that have the largest sum of weights."""
    order = sorted(range(len(spans_s)), key=lambda index: spans_s[index][1])
    ends_s = [spans_s[index][1] for index in order]
    best = [0]  # entry n: the largest sum of the first n spans in order of end
    before: list[int] = []
    for position, index in enumerate(order):
        before.append(bisect_left(ends_s, spans_s[index][0]))
        best.append(max(best[position], best[before[position]] + weights[index]))
    chosen: set[int] = set()
    position = len(order)
    while position:
        if best[position] == best[position - 1]:
            position -= 1
        else:
            chosen.add(order[position - 1])
            position = before[position - 1]
    return chosen


def _in_time(
    spare_s: float, tbt_s: float, steps: _BestSteps, request: SimRequest
) -> tuple[int, int] | None:
    """Return the first and the last token that a request alone can have in time.

    ``spare_s`` is the time to spare for token 0. For token ``k`` the time to spare is quadratic and
    concave in ``k``, so the tokens in time are contiguous.
    """
    # Step k attends to prompt + k tokens; one less, because segments round contexts down.
    step_s = steps.fixed_s + steps.sequence_s + steps.context_s * (request.prompt_tokens - 0.5)
    gain_s, loss_s = tbt_s - step_s, steps.context_s / 2

    def is_in_time(index: int) -> bool:
        left_s = spare_s + index * gain_s - index * index * loss_s
        return left_s >= -_TOLERANCE * (1 + abs(spare_s) + index * tbt_s)

    end = request.output_tokens
    if end <= 0:
        return None
    best = min(max(0, round(gain_s / (2 * loss_s))), end - 1) if loss_s > 0 else (
        end - 1 if gain_s > 0 else 0
    )  # fmt: skip
    if not is_in_time(best):
        return None
    first = _bisect(0, best, is_in_time) if not is_in_time(0) else 0
    last = _bisect(end - 1, best, is_in_time) if not is_in_time(end - 1) else end - 1
    return first, last


def _bisect(bad: int, good: int, is_good: Callable[[int], bool]) -> int:
    """Return the good index nearest to ``bad``."""
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        if is_good(middle):
            good = middle
        else:
            bad = middle
    return good


class _Piece(NamedTuple):
    """Tokens of a request whose deadlines are in one slot, with the work of the lightest.

    ``begin`` and ``end`` are the slots of arrival and deadline. ``work_s`` is the work of a token
    without the ``fixed_s`` of a step, of which ``crowd_share`` falls to the token in the first
    division; in the second, all if ``is_alone``.
    """

    begin: int
    end: int
    num_tokens: int
    work_s: float
    fixed_s: float
    crowd_share: float
    is_alone: bool


def _pieces(task: _Task, slot_s: float) -> Iterator[_Piece]:
    arrival_s, steps = task.request.arrival_s, task.steps
    prefill_s = task.prefill_s / (task.last - task.first + 1)
    begin = max(0, math.floor(arrival_s / slot_s * (1 - _TOLERANCE)))
    index = task.first
    if not index:  # the prefill makes token 0
        yield _Piece(begin, _slot(task.due_s(0), slot_s), 1, prefill_s, 0.0, 0.0, False)
        index = 1
    while index <= task.last:
        slot = _slot(task.due_s(index), slot_s)
        left_s, count = slot * slot_s - task.due_s(index), task.last - index + 1
        if task.tbt_s > 0:
            count = min(count, 1 + max(0, math.floor(left_s / task.tbt_s)))
        context_s = steps.context_s * (task.request.prompt_tokens + index - 1)
        work_s = prefill_s + steps.sequence_s + context_s
        share = 1 / task.crowd.largest(arrival_s, slot * slot_s)
        yield _Piece(begin, slot, count, work_s, steps.fixed_s, share, task.is_alone)
        index += count


def _slot(due_s: float, slot_s: float) -> int:
    return min(math.ceil(due_s / slot_s * (1 - _TOLERANCE)), _NUM_SLOTS)


class _Windows:
    """Tokens by slot of arrival, slot of deadline and class of work."""

    def __init__(self, slot_s: float, num_devices: int) -> None:
        self._slot_s = slot_s
        self._num_devices = num_devices
        # By slot of arrival and slot of deadline: number and total work of tokens by class.
        self._tokens: defaultdict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)

    def add(self, piece: _Piece, alone_part: float) -> None:
        """Add tokens, with a mean of the two divisions of the fixed time."""
        share = alone_part * piece.is_alone + (1 - alone_part) * piece.crowd_share
        work_s = piece.work_s + share * piece.fixed_s
        self._count(piece.begin, piece.end, work_s, piece.num_tokens)

    def _count(self, begin: int, end: int, work_s: float, count: int) -> None:
        level = math.floor(math.log(max(work_s, _LEAST_WORK_S) / _LEAST_WORK_S, _CLASS_FACTOR))
        sums = self._tokens[begin, end].setdefault(level, [0.0, 0.0])
        sums[0] += count
        sums[1] += count * work_s

    def least_lost(self) -> float:
        """Return the largest sum of late tokens over disjoint windows."""
        lost = [[0.0] * (_NUM_SLOTS + 1) for _ in range(_NUM_SLOTS)]
        # Tokens with arrival in ``begin`` or later, by slot of deadline.
        by_end: list[dict[int, list[float]]] = [{} for _ in range(_NUM_SLOTS + 1)]
        for begin in reversed(range(_NUM_SLOTS)):
            window: dict[int, list[float]] = {}
            for end in range(begin, _NUM_SLOTS + 1):
                _merge(by_end[end], self._tokens.get((begin, end), {}))
                _merge(window, by_end[end])
                room_s = (end - begin) * self._slot_s * self._num_devices
                if end > begin:
                    lost[begin][end] = _lost(window, room_s * (1 + _TOLERANCE))
        best = [0.0] * (_NUM_SLOTS + 1)
        for end in range(1, _NUM_SLOTS + 1):
            best[end] = max(best[begin] + lost[begin][end] for begin in range(end))
        return best[-1]


def _merge(window: dict[int, list[float]], sums: Mapping[int, Sequence[float]]) -> None:
    for level, (count, work_s) in sums.items():
        there = window.setdefault(level, [0.0, 0.0])
        there[0] += count
        there[1] += work_s


def _lost(window: Mapping[int, Sequence[float]], room_s: float) -> float:
    """Return how many tokens of a window cannot be made in ``room_s`` seconds of devices."""
    if sum(work_s for _, work_s in window.values()) <= room_s:
        return 0.0
    lost = 0.0
    for level in sorted(window):
        count, work_s = window[level]
        if work_s <= room_s:
            room_s -= work_s
            continue
        # The lightest tokens of the class have at least the work at which the class begins; of the
        # lightest class nothing is known.
        if level:
            least_s = _LEAST_WORK_S * _CLASS_FACTOR**level * (1 - _TOLERANCE)
            lost += max(0.0, count - room_s / least_s)
            room_s = 0.0
    return lost
