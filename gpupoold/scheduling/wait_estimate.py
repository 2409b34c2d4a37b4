"""Why requests wait, and how long: a new request, and until answers have ended.

The estimates use the policy's own quantities: planned turns and their order
(:mod:`.policies.planned_turns`), predicted steps, prefills and switches. The estimates fit the
policy ``gpupool`` and are rough for other policies.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpupoold.domain import Turns, WaitingTurn
from gpupoold.scheduling.admission import (
    admits,
    is_alone,
    is_background_turn,
    num_ahead,
    prefill_order,
    time_factor,
)
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.placement import place, stage
from gpupoold.scheduling.policies.planned_turns import (
    FIRST_TOKEN_SHARE,
    BatchWork,
    Loads,
    Switching,
    Tuning,
    order_planned_turns,
    own_load,
    plan_turn,
    switching_of,
    work_of,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, RequestPhase, State

# Most answers sampled for a drain, at equal distances.
_MAX_ANSWERS = 64
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.05, 3600.0, 1.15

_TUNING = Tuning()
_NOT_SENT = (RequestPhase.HELD, RequestPhase.QUEUED)

MaxTokens = Callable[[str], int | None]


def _unbounded(request_id: str) -> int | None:
    return None


class WaitingAnswer(NamedTuple):
    """A running or future answer: a token per ``pace_s`` after ``start_in_s``.

    ``lengths`` are sorted lengths of similar answers; the answer has ``num_tokens`` now and at most
    ``max_tokens``.
    """

    start_in_s: float
    pace_s: float
    num_tokens: int
    max_tokens: float
    lengths: Sequence[float]

    def ended_by(self, in_s: float) -> float:
        """Return the share of similar answers, as long already, that have ended by then."""
        if in_s < self.start_in_s:
            return 0.0
        reached = self.num_tokens + (in_s - self.start_in_s) / self.pace_s
        if reached >= self.max_tokens:
            return 1.0
        num_shorter = bisect_right(self.lengths, self.num_tokens)
        num_left = len(self.lengths) - num_shorter
        if not num_left:
            # Longer than all similar answers: assumed to become twice as long.
            return float(reached >= 2 * self.num_tokens)
        return (bisect_right(self.lengths, reached) - num_shorter) / num_left


@dataclass(frozen=True, slots=True)
class Drain:
    """Expected ends of ``num_answers``: ``num_ended`` by each of ``times_s``, seconds from now."""

    num_answers: int
    times_s: tuple[float, ...]
    num_ended: tuple[float, ...]

    def seconds_until(self, num: int) -> float | None:
        """Return the time when ``num`` have ended, extrapolated beyond the number of answers.

        None without any answer.
        """
        if not self.num_answers:
            return None
        rounds, last = divmod(num - 1, self.num_answers)
        return rounds * self.times_s[-1] + self._within(last + 1)

    def _within(self, num: int) -> float:
        index = bisect_left(self.num_ended, num)
        if index == 0:
            return self.times_s[0]
        if index == len(self.times_s):
            return self.times_s[-1]
        # Interpolate linearly between two times.
        low, high = self.num_ended[index - 1], self.num_ended[index]
        share = (num - low) / (high - low)
        return self.times_s[index - 1] + share * (self.times_s[index] - self.times_s[index - 1])


def first_token_in_s(state: State, model: Model, prompt_tokens: int, now_s: float) -> float | None:
    """Return the seconds to the first token of a new request; None without a device.

    Later requests that would precede the request are ignored.
    """
    cached_tokens = state.cached.predict(model.name, prompt_tokens)
    newcomer = Request("", model, now_s, prompt_tokens, None, cached_tokens=cached_tokens)
    hosts = state.prefill_hosts(model)
    if not hosts:
        return None
    if state.is_split:
        device, rule, in_s = stage(newcomer, hosts, state, now_s)
        if rule is Rule.CONVERTED:
            return in_s
    else:
        # Without the device that had the model last, which only the policy knows.
        device, _ = place(newcomer, hosts, Loads(), {}, _TUNING)
    return _first_on(device, newcomer, now_s)


def next_token_in_s(state: State, request: Request, now_s: float) -> float | None:
    """Return the seconds to a live request's next token.

    None while no device can make the token, or while the request waits for a turn without an end.
    """
    model = request.model
    if request.device is None:
        return first_token_in_s(state, model, request.context_tokens, now_s)
    device = state.devices[request.device]
    wait_s = 0.0
    works = work_of(device)
    mine = next((work for work in works if work.model is model), None)
    if request.phase is RequestPhase.MOVING:
        kv_bytes = request.context_tokens * model.kv_bytes_per_token
        wait_s = 2 * kv_bytes / device.bandwidth_bytes_per_s  # out, and in
        mine = _with(request, mine, device, prefill_s=0.0, num_waiting=0)
    elif device.is_waiting_for_kv(request):
        wait_s = _room_after_s(device, _num_before(device, request) + 1, now_s)
        mine = _with(request, mine, device)
    assert mine is not None  # the request is queued or in a batch
    in_s = wait_s + _next_on(device, request, mine, works, now_s)
    return in_s if math.isfinite(in_s) else None


def drain_of(
    state: State, model: Model | None, now_s: float, max_tokens: MaxTokens = _unbounded
) -> Drain:
    """Return the expected ends of a model's answers, or of all, assuming that requests follow.

    ``max_tokens`` returns a request's limit, None for no limit. Requests of models without a device
    are left out.
    """
    requests = [request for request in state.requests.values() if model in (None, request.model)]
    return _drain(requests, state, now_s, max_tokens)


def _drain(requests: Sequence[Request], state: State, now_s: float, max_tokens: MaxTokens) -> Drain:
    stride = max(1, math.ceil(len(requests) / _MAX_ANSWERS))
    answers = list(_answers(requests[::stride], state, now_s, max_tokens))
    times_s: list[float] = []
    num_ended: list[float] = []
    at_s = _SHORTEST_S
    while answers and at_s < _LONGEST_S:
        times_s.append(at_s)
        num_ended.append(stride * sum(answer.ended_by(at_s) for answer in answers))
        if num_ended[-1] >= stride * len(answers):
            break
        at_s *= _GROWTH
    num_answers = min(len(requests), stride * len(answers))
    return Drain(num_answers, tuple(times_s), tuple(num_ended))


def _answers(
    requests: Iterable[Request], state: State, now_s: float, max_tokens: MaxTokens
) -> Iterable[WaitingAnswer]:
    known: dict[tuple[int | None, str, bool], tuple[float, float] | None] = {}
    lengths: dict[str, Sequence[float]] = {}
    for request in requests:
        model = request.model
        has_begun = request.phase is RequestPhase.DECODING
        key = request.device, model.name, has_begun
        if key not in known:
            known[key] = _start_and_pace(request, state, now_s, has_begun=has_begun)
            lengths.setdefault(model.name, _lengths_of(model, state))
        times = known[key]
        if times is not None:
            bound = max_tokens(request.id) or math.inf
            yield WaitingAnswer(*times, request.num_tokens, bound, lengths[model.name])


def _lengths_of(model: Model, state: State) -> Sequence[float]:
    return sorted(state.lengths.recent(model.name)) or [state.lengths.predict(model.name, 1)]


def _start_and_pace(
    request: Request, state: State, now_s: float, *, has_begun: bool
) -> tuple[float, float] | None:
    """Return an answer's start and time per token in seconds; None without a device."""
    model = request.model
    device = state.devices[request.device] if request.device is not None else None
    if device is None:
        device = next(iter(state.prefill_hosts(model)), None)
    if device is None:
        return None
    pace_s = _pace_s(device, model)
    if has_begun:
        return device.working[model.name].prefill_s(), pace_s
    latecomer = Request("", model, now_s, 0, None)
    return _first_on(device, latecomer, now_s, for_kv=False), pace_s


def _pace_s(device: DeviceState, model: Model) -> float:
    """Return the seconds between two tokens of an answer at the device's present load.

    Planned turns give every batch the same lead, so the device's time is shared in proportion to
    the needs of each batch.
    """
    load = sum(_refilled_load(batch) for batch in device.working.values())
    new = [batch.model for name, batch in device.queued.items() if name not in device.working]
    load += sum(own_load(model, device) for model in new)
    if model.name not in device.working and model.name not in device.queued:
        load += own_load(model, device)
    works = work_of(device)
    if len(works) > 1 and switching_of(device, works, _TUNING).is_exposed:
        load *= 1 + 1 / _TUNING.exposed_switch_factor
    return load * model.targets.tbt_s


def _refilled_load(batch: Batch) -> float:
    """Return the device's share for a batch whose ended requests are replaced by similar ones.

    The prompts of the replacements count too.
    """
    model, num_requests = batch.model, len(batch.requests)
    steps_s = batch.step_s()
    prefill_s = batch.speed.costs.prefill_s(batch.prompt_tokens // num_requests)
    prefills_s = num_requests * prefill_s / max(batch.expected_tokens / num_requests, 1.0)
    return (steps_s + prefills_s) / model.targets.tbt_s


def _first_on(
    device: DeviceState, newcomer: Request, now_s: float, *, for_kv: bool = True
) -> float:
    """Return the seconds to the first token on this device, with the wait for KV memory if
    ``for_kv``.
    """
    model = newcomer.model
    wait_s = _kv_room_in_s(device, newcomer, now_s) if for_kv else 0.0
    works = work_of(device)
    mine = _with(newcomer, next((work for work in works if work.model is model), None), device)
    return wait_s + _next_on(device, newcomer, mine, works, now_s)


def _next_on(
    device: DeviceState, request: Request, mine: BatchWork, works: list[BatchWork], now_s: float
) -> float:
    """Return the seconds to a request's next token on its device.

    ``mine`` is its model's work including the request; ``works`` is all work.
    """
    model, turn = mine.model, device.turn
    left_s = max(device.turn_began_s + turn.quota_s - now_s, 0.0) if turn else 0.0
    if is_background_turn(device) and not request.is_background:
        left_s = 0.0
    if turn is not None and turn.model == model.name:
        step_s = device.working[model.name].step_s() if model.name in device.working else 0.0
        start_s = max(device.turn_began_s - now_s, 0.0) + step_s / 2
        next_s = start_s + _prefills_s(device, request, mine, now_s + start_s)
        if device.then is None or next_s <= left_s + mine.step_s:
            return next_s
    on_turn = turn.model if turn else None
    others = [work for work in works if work.model.name not in (on_turn, model.name)]
    if not request.num_tokens and request.arrival_s >= device.turn_began_s:
        # The turn ends early for a request that arrived after its start, see the policy's revise().
        ready_s = device.switch_s(model) + mine.prefill_s
        due_in_s = request.counted_arrival_s - now_s + FIRST_TOKEN_SHARE * model.targets.ttft_s
        left_s = min(left_s, max(due_in_s - ready_s, 0.0))
    in_s = _after_others(device, request, mine, others, left_s, now_s)
    return in_s + mine.step_s if request.num_tokens else in_s


def _after_others(
    device: DeviceState,
    request: Request,
    mine: BatchWork,
    others: list[BatchWork],
    left_s: float,
    now_s: float,
) -> float:
    """Return the seconds until the turn: the present turn, and turns due earlier."""
    model = mine.model
    switch_s = device.switch_s(model)
    switching = switching_of(device, [*others, mine], _TUNING)
    planned_turns = [
        plan_turn(work, now_s, device.switch_s(work.model), switching, _TUNING)
        for work in (*others, mine)
    ]
    start_s = left_s
    for planned_turn in order_planned_turns(planned_turns, left_s, switching.is_exposed):
        if planned_turn.model == model.name:
            break
        start_s += planned_turn.duration_s
    start_s += _stall_s(switch_s, start_s, switching)
    return start_s + _prefills_s(device, request, mine, now_s + start_s)


def _prefills_s(device: DeviceState, request: Request, mine: BatchWork, start_s: float) -> float:
    """Return the seconds of its model's prefills up to the request's own, from ``start_s``.

    The order is the policy's, see :mod:`.admission`. A request with tokens waits for all
    prefills that are not deferred.
    """
    working, speed = device.working.get(mine.model.name), mine.speed
    sent_s = working.prefill_s() if working else 0.0
    if request.phase is RequestPhase.SENT:
        return sent_s
    queued = [request for request in mine.requests if request.phase in _NOT_SENT]
    factor = time_factor(working) if is_alone(mine.model.name, device) else 1.0
    order = prefill_order(queued, mine.prefill_s - sent_s, speed, start_s + factor * sent_s, factor)
    if not order.late:
        factor = 1.0
    elif request.num_tokens:
        order = order._replace(late=())
    before_s = sent_s
    for before in (*order.on_time, *order.late):
        before_s += speed.costs.prefill_s(before.prefill_tokens)
        if before is request:
            break
    return factor * before_s


def _stall_s(switch_s: float, start_s: float, switching: Switching) -> float:
    return switch_s if switching.is_exposed else max(switch_s - start_s, 0.0)


def _with(
    newcomer: Request,
    work: BatchWork | None,
    device: DeviceState,
    prefill_s: float | None = None,
    num_waiting: int = 1,
) -> BatchWork:
    model, speed = newcomer.model, device.speed(newcomer.model)
    own_s = speed.costs.prefill_s(newcomer.prefill_tokens) if prefill_s is None else prefill_s
    if work is None:
        due_s, step_s = [newcomer.next_deadline_s], speed.step_s(1, 0)
        return BatchWork(model, [newcomer], due_s, step_s, own_s, num_waiting, True, speed)
    return work._replace(
        requests=[*work.requests, newcomer],
        deadlines_s=[*work.deadlines_s, newcomer.next_deadline_s],
        prefill_s=work.prefill_s + own_s,
        num_waiting=work.num_waiting + num_waiting,
        is_background=work.is_background and newcomer.is_background,
    )


def _kv_room_in_s(device: DeviceState, newcomer: Request, now_s: float) -> float:
    """Return the seconds until KV memory is free for all in the queue and the request."""
    if admits(device, newcomer):
        return 0.0
    return _room_after_s(device, num_ahead(device, now_s) + 1, now_s)


def _num_before(device: DeviceState, request: Request) -> int:
    lines = device.waiting_for_kv.values()
    return sum(
        other.arrival_s < request.arrival_s for line in lines for other in line.requests.values()
    )


def _room_after_s(device: DeviceState, num_ended: int, now_s: float) -> float:
    """Return the seconds until ``num_ended`` of the device's answers have ended, as expected."""
    batches = device.working.values()
    state = State(devices={device.number: device})
    begun = [
        request
        for batch in batches
        for request in batch.requests.values()
        if request.phase is RequestPhase.DECODING
    ]
    drain = _drain(begun, state, now_s, _unbounded)
    return drain.seconds_until(num_ended) or 0.0


class Wait(NamedTuple):
    """A request's place by arrival among those waiting for a first token on its device, from 1.

    Requests without a device have places of their own. ``first_token_in_s`` is None if unknown.

    An estimate takes half a millisecond of a busy box, so only the first and the last request of a
    *line*, the waiting requests of a model on a device, are estimated. The others are interpolated.
    """

    place: int
    first_token_in_s: float | None


class Line(NamedTuple):
    """The waiting requests of a model on a device, by arrival, and the places of these requests."""

    requests: Sequence[Request]
    places: Sequence[int]


def lines_of(state: State, request_ids: Collection[str]) -> list[Line]:
    """Return the lines that contain some of these requests."""
    num_on_device: defaultdict[int | None, int] = defaultdict(int)
    lines: defaultdict[tuple[int | None, str], list[tuple[Request, int]]] = defaultdict(list)
    waiting = (request for request in state.requests.values() if not request.num_tokens)
    for request in sorted(waiting, key=lambda request: request.arrival_s):
        num_on_device[request.device] += 1
        place = num_on_device[request.device]
        lines[request.device, request.model.name].append((request, place))
    return [
        Line([request for request, _ in line], [place for _, place in line])
        for line in lines.values()
        if any(request.id in request_ids for request, _ in line)
    ]


def waits_of(state: State, line: Line, now_s: float) -> Iterator[tuple[str, Wait]]:
    """Yield the id and the wait of each request of a line that still waits."""
    pairs = zip(line.requests, line.places, strict=True)
    still = [(request, at) for request, at in pairs if state.requests.get(request.id) is request]
    still = [(request, at) for request, at in still if not request.num_tokens]
    if not still:
        return
    first_s = next_token_in_s(state, still[0][0], now_s)
    last_s = next_token_in_s(state, still[-1][0], now_s) if len(still) > 1 else first_s
    for index, (request, ahead) in enumerate(still):
        in_s = None
        if first_s is not None and last_s is not None:
            in_s = first_s + (last_s - first_s) * index / max(1, len(still) - 1)
        yield request.id, Wait(ahead, in_s)


class Standing(StrEnum):
    """The place of a live request: the reason to wait, or the stage.

    The rules are recorded at the time of the decision (:mod:`.rules`), and the queue of a device
    comes from the policy. The times are estimates of this module.
    """

    NO_DEVICE = "no-device"
    HELD = "held"
    KV_ROOM = "kv-room"
    WAITS_FOR_TURN = "waits-for-turn"
    BEHIND_PROMPTS = "behind-prompts"
    PREFILLING = "prefilling"
    PAUSED = "paused"
    ON_TURN = "on-turn"
    MOVING = "moving"


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """The place of a request, the rule that chose the device, and the time to the next token.

    The time is None if unknown. ``num_before`` requests are ahead in the queue for KV memory.
    """

    standing: Standing
    device: int | None
    rule: Rule | None
    next_token_in_s: float | None
    num_before: int = 0


def turns_of(policy: Policy, state: State, device: DeviceState, now_s: float) -> Turns:
    """Return the present turn on a device and the queue."""
    turn = device.turn
    used_s = max(now_s - device.turn_began_s, 0.0) if turn else 0.0
    has_end = turn is not None and device.then is not None and math.isfinite(turn.quota_s)
    left_s = max(turn.quota_s - used_s, 0.0) if turn is not None and has_end else None
    line: list[WaitingTurn] = []
    at_s = left_s if turn is not None else 0.0
    for request in policy.line(device, state, now_s):
        num = _num_requests(device, request.model)
        line.append(
            WaitingTurn(
                request.model, request.rule.value, request.rule.why, at_s, request.duration_s, num
            )
        )
        at_s = None if at_s is None or request.duration_s is None else at_s + request.duration_s
    rule = device.turn_rule if turn else None
    name, why = (rule.value, rule.why) if rule else (None, None)
    return Turns(device.number, turn.model if turn else None, name, why, used_s, left_s, line)


def why_request(state: State, request: Request, now_s: float) -> RequestExplanation:
    """Return the explanation of a live request of the state."""
    standing = standing_of(state, request)
    if standing is Standing.NO_DEVICE:
        return RequestExplanation(standing, None, None, None)
    in_s = next_token_in_s(state, request, now_s)
    num_before = 0
    if standing is Standing.KV_ROOM and request.device is not None:
        num_before = _num_before(state.devices[request.device], request)
    return RequestExplanation(standing, request.device, request.rule, in_s, num_before)


def standing_of(state: State, request: Request) -> Standing:
    """Return the place of a request."""
    if request.phase is RequestPhase.HELD or request.device is None:
        return Standing.HELD if request.model.hosts else Standing.NO_DEVICE
    if request.phase is RequestPhase.MOVING:
        return Standing.MOVING
    device = state.devices[request.device]
    if device.is_waiting_for_kv(request):
        return Standing.KV_ROOM
    is_on_turn = device.turn is not None and device.turn.model == request.model.name
    if request.phase is RequestPhase.DECODING:
        return Standing.ON_TURN if is_on_turn else Standing.PAUSED
    if not is_on_turn:
        return Standing.WAITS_FOR_TURN
    is_sent = request.phase is RequestPhase.SENT
    return Standing.PREFILLING if is_sent else Standing.BEHIND_PROMPTS


def _num_requests(device: DeviceState, model: str) -> int:
    batches = device.working.get(model), device.queued.get(model)
    return sum(len(batch.requests) for batch in batches if batch is not None)
