"""Planned turns of a device: duration, value and order.

A *planned turn* makes the first tokens of a model's waiting requests, then decodes its batch until
every request in the batch has a lead of ``window`` on its deadlines. Turns are ordered by deadline
while all deadlines can be met; otherwise the turns with the fewest on-time tokens per second of the
device are put off (Moore and Hodgson's rule, with weights). Expired requests do not influence the
order: they run with their batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from gpupoold.scheduling.admission import PATIENCE_S, split_by_deadline
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, Speed

# Memory weighs less than time: KV that does not fit can be offloaded, a step cannot be saved.
_KV_WEIGHT = 0.75
# A smaller difference of loads, in shares of a device, justifies no other device than the home.
LOAD_GRAIN = 0.1
# Share of the TTFT target at which a turn cut short for a new request gives the first token.
FIRST_TOKEN_SHARE = 0.7
# Least lead gained by a step, as a share of the TBT target: times are divided by the gain.
LEAST_GAIN_SHARE = 0.05
# Least duration of a planned turn, because values are divided by durations.
_LEAST_TURN_S = 1e-3


@dataclass(frozen=True, slots=True)
class Tuning:
    """Shares of the TTFT target, and times; found with ``gpupool simulate``."""

    # Lead of a batch at the end of its turn. A longer lead needs fewer switches, but a new request
    # waits for a round of such turns and must still be on time.
    lead_share: float = 0.7
    # A request later than this is expired and no reason for a turn: in overload, catching up with
    # one request makes other requests late, and all tokens have equal value.
    expired_share: float = 0.002
    # A device with a higher load begins another model only at the last moment.
    full_load: float = 1.0
    # A device with a higher load shares its model with a device that has no other model's requests:
    # with the second load also if the weights must be copied there.
    spread_load: float = 0.5
    copy_load: float = 0.8
    # Highest load of a second device for a model: splitting the batch pays only below.
    second_device_load: float = 0.8
    latest_start_share: float = 0.2
    # A turn is at least as long as the copy hidden by it, or as this many exposed switches.
    exposed_switch_factor: float = 4.0
    turn_min_s: float = 0.25
    turn_max_s: float = 4.0
    # Where nothing has to move, turns are so short that an answer pauses no longer than this.
    pause_s: float = 0.04
    # A batch that has waited this long for a turn is starving and goes first, expired or not. In
    # overload all starving batches together get only ``starvation_share`` of the device.
    patience_s: float = PATIENCE_S
    starvation_share: float = 0.03


class BatchWork(NamedTuple):
    """The requests of one model on a device, sent or queued.

    ``deadlines_s``: the next deadline of each; ``step_s``: a decode step with all of them;
    ``prefill_s``: the missing first tokens of ``num_waiting`` requests; ``is_new``: the device has
    not begun the model; ``speed``: the model's speed on the device; ``is_background``: all requests
    run in time that others leave.
    """

    model: Model
    requests: list[Request]
    deadlines_s: Sequence[float]
    step_s: float
    prefill_s: float
    num_waiting: int
    is_new: bool
    speed: Speed
    is_background: bool = False


class Prompts(NamedTuple):
    """Requests of one model that wait for a first token, and the seconds of its prefills."""

    model: Model
    requests: list[Request]
    prefill_s: float


class PlannedTurn(NamedTuple):
    """Duration, value and deadline of a turn made now.

    ``due_in_s``: time to the first deadline to meet, infinite if all are expired; ``duration_s``
    includes the exposed part of the switch, ``quota_s`` does not. ``waited_s``: time since the last
    turn, or since there is work. ``rule``: a rule of the policy that has changed the other values.
    ``catch_up_s``: time until one of the requests is on time again.
    ``is_ahead``: no token is due before the end of the window, even without the turn.
    ``is_background``: the turn is for requests that run in time that others leave.
    """

    model: str
    due_in_s: float
    duration_s: float
    quota_s: float
    tokens_in_time: float
    waited_s: float = 0.0
    rule: Rule | None = None
    is_ahead: bool = False
    is_background: bool = False
    catch_up_s: float = 0.0

    @property
    def density(self) -> float:
        """Tokens on time per second."""
        return self.tokens_in_time / self.duration_s


@dataclass(frozen=True, slots=True)
class Switching:
    """The effect of switching on planned turns.

    ``floor_s``: the shortest useful turn; ``is_exposed``: no other turn hides the copy.
    """

    floor_s: float
    is_exposed: bool


def work_of(device: DeviceState) -> list[BatchWork]:
    """Return the device's requests by model, without requests migrating to the device."""
    begun = [_work(batch, device.queued.get(name)) for name, batch in device.working.items()]
    new = [batch for name, batch in device.queued.items() if name not in device.working]
    return begun + [_work(batch, None, is_new=True) for batch in new]


def prompts_since(device: DeviceState, since_s: float, besides: str) -> Iterator[Prompts]:
    """Yield the requests waiting for a first token, by model, without the model ``besides``.

    Models whose requests all arrived until ``since_s`` are left out.
    """
    waiting = [name for name, batch in device.working.items() if batch.num_waiting]
    names = dict.fromkeys([*waiting, *device.queued])
    names.pop(besides, None)
    for name in names:
        found = (device.working.get(name), device.queued.get(name))
        batches = [batch for batch in found if batch is not None]
        requests = [
            request
            for batch in batches
            for request in batch.requests.values()
            if not request.num_tokens
        ]
        if all(request.arrival_s <= since_s for request in requests):
            continue
        yield Prompts(batches[0].model, requests, sum(batch.prefill_s() for batch in batches))


def _work(batch: Batch, queued: Batch | None, *, is_new: bool = False) -> BatchWork:
    model, requests = batch.model, list(batch.requests.values())
    deadlines_s = batch.deadlines_s
    step_s, prefill_s, num_waiting = batch.step_s(), batch.prefill_s(), batch.num_waiting
    is_background = batch.is_background
    if queued is not None:
        requests += queued.requests.values()
        deadlines_s = [*deadlines_s, *queued.deadlines_s]
        prefill_s += queued.prefill_s()
        num_waiting += queued.num_waiting
        step_s = batch.speed.step_s(len(requests), batch.context_tokens)
        is_background = is_background and queued.is_background
    return BatchWork(
        model,
        requests,
        deadlines_s,
        step_s,
        prefill_s,
        num_waiting,
        is_new,
        batch.speed,
        is_background,
    )


def load_of(device: DeviceState) -> float:
    """Return a device's load: the needed share of time, plus the weighted share of memory.

    The share of time keeps all requests on target, prompts included; the share of memory holds the
    KV, with the weight ``_KV_WEIGHT``.
    """
    load = 0.0
    kv_bytes = 0
    for batch in device.working.values():
        load += batch.load()
        kv_bytes += batch.context_tokens * batch.model.kv_bytes_per_token
    for request in device.moving.values():
        kv_bytes += request.context_tokens * request.model.kv_bytes_per_token
        load += more_load(request, device)
    load += _KV_WEIGHT * kv_bytes / device.up.capacity_bytes
    for batch in device.queued.values():
        load += queue_load(batch, device)
    return load


class Loads:
    """The devices' loads during one decision, computed lazily and once."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def of(self, device: DeviceState) -> float:
        load = self._known.get(device.number)
        if load is None:
            load = self._known[device.number] = load_of(device)
        return load

    def move(self, less: float, more: float, source: DeviceState, target: DeviceState) -> None:
        """Shift load ``less`` from one device to load ``more`` on another."""
        self._known[source.number] = self.of(source) - less
        self._known[target.number] = self.of(target) + more

    def forget(self, device: DeviceState) -> None:
        self._known.pop(device.number, None)


def load_of_batch(batch: Batch, device: DeviceState) -> float:
    """Return a batch's part of its device's load."""
    return batch.load() + _KV_WEIGHT * batch.kv_bytes / device.up.capacity_bytes


def queue_load(batch: Batch, device: DeviceState) -> float:
    """Return the increase of a device's load by queued requests of a model.

    Counts the prompts, and a first step if the device does not run the model yet.
    """
    model = batch.model
    load = batch.prefill_s(device.speed(model)) / model.targets.ttft_s
    if model.name not in device.working:
        load += own_load(model, device)
    return load


def own_load(model: Model, device: DeviceState) -> float:
    """Return the increase of a device's load by a model's first request, without its prompt."""
    return device.speed(model).step_s(1, 0) / model.targets.tbt_s


def more_load(request: Request, device: DeviceState) -> float:
    """Return the increase of a device's load by one more answer in its model's steps."""
    batch = device.batches[request.model.name]
    num_requests, tokens = len(batch.requests), batch.context_tokens
    step_s = batch.speed.step_s(num_requests + 1, tokens + request.context_tokens)
    if num_requests:
        step_s -= batch.speed.step_s(num_requests, tokens)
    return step_s / request.model.targets.tbt_s


def switching_of(device: DeviceState, works: Sequence[BatchWork], tuning: Tuning) -> Switching:
    """Return the effect of switching between ``works``.

    The copy of the next model is hidden by the turn before if the device prefetches and the two
    largest models fit together with all KV.
    """
    missing_s, kv_bytes, largest, second = 0.0, 0, 0, 0
    for work in works:
        model = work.model
        missing_s = max(missing_s, device.switch_s(model))
        kv_bytes += device.kv_bytes(model)
        if model.weight_bytes > largest:
            largest, second = model.weight_bytes, largest
        elif model.weight_bytes > second:
            second = model.weight_bytes
    if not missing_s:
        return Switching(tuning.turn_min_s, is_exposed=False)
    if device.up.prefetches and largest + second + kv_bytes <= device.up.capacity_bytes:
        return Switching(max(tuning.turn_min_s, missing_s), is_exposed=False)
    exposed_s = missing_s * tuning.exposed_switch_factor
    return Switching(max(tuning.turn_min_s, exposed_s), is_exposed=True)


def plan_turn(
    work: BatchWork,
    now_s: float,
    switch_s: float,
    switching: Switching,
    tuning: Tuning,
    waited_s: float = 0.0,
    *,
    prefills_only: bool = False,
) -> PlannedTurn:
    """Plan a turn for this work now; ``switch_s`` is the time to make its model resident.

    With ``prefills_only`` the turn ends with the first tokens: answers continue elsewhere. So does
    the turn of a pooling model, whose results count as first tokens.
    """
    targets, step_s, prefill_s = work.model.targets, work.step_s, work.prefill_s
    window_s, tbt_s = tuning.lead_share * targets.ttft_s, targets.tbt_s
    expired_at_s = now_s - tuning.expired_share * targets.ttft_s
    stall_s = switch_s if switching.is_exposed else 0.0
    hopeful, late = work.deadlines_s, list[float]()
    due_at_s = min(hopeful)
    if due_at_s < expired_at_s:
        hopeful = [deadline_s for deadline_s in hopeful if deadline_s >= expired_at_s]
        due_at_s = min(hopeful, default=math.inf)
    due_in_s, hopeful_prefill_s = due_at_s - now_s, prefill_s
    has_expired = len(hopeful) < len(work.deadlines_s)
    if prefill_s and (has_expired or due_in_s < stall_s + prefill_s):
        hopeful, late, hopeful_prefill_s = split_by_deadline(
            work.requests, work.deadlines_s, expired_at_s, work.speed, now_s + stall_s
        )
    if prefills_only or not work.model.generates:
        due_s = due_in_s - stall_s - prefill_s / max(1, work.num_waiting)
        num_in_time = _num_first_in_time(hopeful, now_s + stall_s, hopeful_prefill_s)
        duration_s = max(prefill_s, _LEAST_TURN_S) + stall_s
        turn = PlannedTurn(work.model.name, due_s, duration_s, prefill_s, num_in_time, waited_s)
        return turn._replace(catch_up_s=duration_s)
    behind_s = window_s - (due_in_s if hopeful else 0.0) + prefill_s
    # Each step adds ``tbt_s`` to the lead and takes ``step_s``.
    gain_s = max(tbt_s - step_s, LEAST_GAIN_SHARE * tbt_s)
    decode_s = min(max(switching.floor_s, behind_s / gain_s * step_s), tuning.turn_max_s)
    if work.is_background:  # the turn ends early for other requests, see the policy's revise()
        decode_s = tuning.turn_max_s
    gains, start_s = (window_s, tbt_s, gain_s, decode_s / step_s), now_s + stall_s
    tokens = _tokens_in_time(hopeful, start_s + hopeful_prefill_s, *gains)
    if late:
        tokens += _tokens_in_time(late, start_s + prefill_s, *gains)
    quota_s = prefill_s + decode_s
    return PlannedTurn(
        work.model.name,
        due_in_s - stall_s,
        quota_s + stall_s,
        quota_s,
        tokens,
        waited_s,
        None,
        due_in_s - stall_s - hopeful_prefill_s >= window_s,
        work.is_background,
        stall_s + prefill_s + (now_s - max(work.deadlines_s)) / gain_s * step_s,
    )


def _tokens_in_time(
    deadlines_s: Sequence[float],
    start_s: float,
    window_s: float,
    tbt_s: float,
    gain_s: float,
    num_steps: float,
) -> float:
    """Return the tokens of a turn that are due within the window and on time.

    The first of ``num_steps`` begins at ``start_s``. A request that is late by then loses the
    tokens until the request has caught up, by ``gain_s`` per step.
    """
    tokens = 0.0
    end_s = start_s + window_s
    full_s = end_s - num_steps * tbt_s
    for deadline_s in deadlines_s:
        if deadline_s >= end_s:
            continue
        in_time = num_steps if deadline_s < full_s else (end_s - deadline_s) / tbt_s
        if deadline_s < start_s:
            in_time += (deadline_s - start_s) / gain_s
            if in_time <= 0:
                continue
        tokens += in_time
    return tokens


def _num_first_in_time(deadlines_s: Sequence[float], start_s: float, prefill_s: float) -> int:
    """Return the number of first tokens on time if prompts of equal length run by deadline.

    The result is at least 1, because first tokens that are due have no lead.
    """
    each_s = prefill_s / max(1, len(deadlines_s))
    ordered = sorted(deadlines_s)
    in_time = sum(deadline_s >= start_s + k * each_s for k, deadline_s in enumerate(ordered, 1))
    return max(1, in_time)


def order_planned_turns(
    planned_turns: Iterable[PlannedTurn], start_in_s: float = 0.0, is_switching_dear: bool = False
) -> list[PlannedTurn]:
    """Return turns in order of execution; see :func:`rank_planned_turns`."""
    ranked = rank_planned_turns(planned_turns, start_in_s, is_switching_dear)
    return [planned_turn for _, group in ranked for planned_turn in group]


Ranked = list[tuple[Rule, list[PlannedTurn]]]


def rank_planned_turns(
    planned_turns: Iterable[PlannedTurn], start_in_s: float = 0.0, is_switching_dear: bool = False
) -> Ranked:
    """Return turns in order of execution with the deciding rules, if the first starts in
    ``start_in_s``.

    Turns are ordered by deadline. If a turn would be late, the least dense earlier turns are put
    off, provided that the turn is then on time and denser than these turns together; otherwise the
    late turn is put off. Turns that are put off come next, the densest first; then turns with only
    expired requests, the first to catch up first; then turns with a lead (before expired turns if
    ``is_switching_dear``); last background turns, the longest waiting first. A turn of infinite
    value is never put off.
    """
    kept, put_off, expired, ahead, background = (list[PlannedTurn]() for _ in range(5))
    at_s = start_in_s
    for planned_turn in sorted(planned_turns, key=attrgetter("due_in_s", "model")):
        if planned_turn.is_background:
            background.append(planned_turn)
            continue
        if math.isinf(planned_turn.due_in_s):
            expired.append(planned_turn)
            continue
        if planned_turn.is_ahead:
            ahead.append(planned_turn)
            continue
        if at_s > planned_turn.due_in_s and not math.isinf(planned_turn.tokens_in_time):
            gone = _gone_for(planned_turn, kept, at_s - planned_turn.due_in_s)
            put_off += gone
            if planned_turn in gone:
                continue
            kept = [turn for turn in kept if turn not in gone]
            at_s -= sum(turn.duration_s for turn in gone)
        kept.append(planned_turn)
        at_s += planned_turn.duration_s
    put_off.sort(key=lambda turn: (-turn.density, turn.due_in_s, turn.model))
    expired.sort(key=attrgetter("catch_up_s", "model"))
    background.sort(key=lambda turn: (-turn.waited_s, turn.model))
    late, early = (Rule.EXPIRED, expired), (Rule.AHEAD, ahead)
    rest = (early, late) if is_switching_dear else (late, early)
    last = (Rule.BACKGROUND, background)
    return [(Rule.DEADLINE, kept), (Rule.PUT_OFF, put_off), *rest, last]


def first_planned_turn(ranked: Ranked) -> tuple[PlannedTurn, Rule] | None:
    """Return the first turn and its rule, None without turns."""
    for rule, group in ranked:
        if group:
            return group[0], group[0].rule or rule
    return None


def _gone_for(
    planned_turn: PlannedTurn, kept: Sequence[PlannedTurn], late_s: float
) -> list[PlannedTurn]:
    """Return the turns to put off so that ``planned_turn`` is on time, or the turn itself."""
    gone: list[PlannedTurn] = []
    for turn in sorted(kept, key=attrgetter("density", "model")):
        if sum(other.duration_s for other in gone) >= late_s:
            break
        gone.append(turn)
    freed_s = sum(turn.duration_s for turn in gone)
    lost = sum(turn.tokens_in_time for turn in gone)
    # Compared per second, because time freed beyond the turn's duration is not lost.
    return gone if freed_s >= late_s and lost < planned_turn.density * freed_s else [planned_turn]
