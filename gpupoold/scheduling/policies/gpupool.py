"""The default policy: every device prefills and decodes; :mod:`.planned_turns` orders turns.

A model is served on the device that runs the model already, else on the device with the least load,
preferring the home device among equals. A request that no device has begun stays in the daemon, and
moves to another device with less load. A full device begins another model only at the last moment,
because another device may become free. A model with too much load for one device gets a second
device. A device without KV memory for a request is full for the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from gpupoold.domain import Role
from gpupoold.scheduling.admission import (
    admits,
    is_alone,
    is_background_turn,
    most_spare,
    next_prefills,
    num_others,
    order_of,
)
from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.policies.base import Choice, InLine, Placement, Policy, waiting_for_kv
from gpupoold.scheduling.policies.placement import (
    able_devices,
    choose,
    chunk_tokens,
    is_worth_a_copy,
    place,
    stage,
    would_delay_answers,
)
from gpupoold.scheduling.policies.planned_turns import (
    FIRST_TOKEN_SHARE,
    LEAST_GAIN_SHARE,
    BatchWork,
    Loads,
    PlannedTurn,
    Ranked,
    Switching,
    Tuning,
    first_planned_turn,
    load_of,
    plan_turn,
    prompts_since,
    queue_load,
    rank_planned_turns,
    switching_of,
    work_of,
)
from gpupoold.scheduling.policies.rebalancing import HomePlanner, Rebalancer
from gpupoold.scheduling.roles import RolePlanner
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, PlannedHome, Request, State


class _Plan(NamedTuple):
    """A device's work, and its possible turns in no order."""

    works: list[BatchWork]
    switching: Switching
    planned_turns: list[PlannedTurn]


class GpupoolPolicy(Policy):
    """The default policy; see the module docstring."""

    name = "gpupool"

    def __init__(self, tuning: Tuning | None = None, *, converts_decoders: bool = True) -> None:
        self._tuning = tuning or Tuning()
        self._converts_decoders = converts_decoders
        self._home: dict[str, int] = {}
        self._answers_home: dict[str, int] = {}  # for answers, if roles are split
        self._served_s: dict[tuple[int, str], float] = {}
        self._no_starvation_until_s: dict[int, float] = {}
        self._planned: dict[int, _Plan] = {}
        self._latest: dict[int, str] = {}  # the model of a device's latest turn
        self._roles = RolePlanner()
        self._planned_homes = HomePlanner(self._tuning.lead_share)
        self._rebalancer = Rebalancer(self._tuning)

    def set_quota_max(self, quota_max_s: float) -> None:
        self._tuning = replace(self._tuning, turn_max_s=quota_max_s)

    def ended(self, request: Request, state: State) -> None:
        self._rebalancer.ended(request)

    def rebalance(self, state: State, now_s: float) -> Iterable[tuple[Request, DeviceState]]:
        return self._rebalancer.migrations(state, now_s)

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        return self._roles.changes(state, now_s)

    def homes(self, state: State, now_s: float) -> Mapping[str, PlannedHome | None]:
        return self._planned_homes.changes(state, now_s)

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place held requests, and queued requests that a better device can take."""
        loads = Loads()
        is_split = state.is_split
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                if request.is_background:
                    chosen, rule = most_spare(request, devices), Rule.BATCHED
                elif is_split:
                    converts = self._converts_decoders
                    chosen, rule, _ = stage(
                        request, devices, state, now_s, converts_decoders=converts
                    )
                else:
                    chosen, rule = place(request, devices, loads, self._home, self._tuning)
                yield Placement(request, chosen, rule)
                loads.forget(chosen)
        yield from self._migrations(state, loads)
        yield from self._moves_for_kv(state, loads)

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        """Return requests of models that work there already or have the turn.

        If not all requests of a model can be on time, only the next prefills are returned.
        """
        on_turn = device.turn.model if device.turn else None
        return [
            prefill
            for name, batch in device.queued.items()
            if name == on_turn or name in device.working
            for prefill in self._next_prefills(device, batch, now_s)
        ]

    def _next_prefills(self, device: DeviceState, queued: Batch, now_s: float) -> Sequence[Request]:
        """Return a model's queued requests to send now.

        A deferred request that has waited for ``patience_s`` precedes requests on time, but not
        more often than the share of starving batches allows.
        """
        name, tuning = queued.model.name, self._tuning
        working = device.working.get(name)
        order = order_of([queued], device, now_s)
        chosen = next_prefills(order, working, queued.speed, tuning.turn_min_s)
        if order.on_time and order.late and self._may_serve_starving(device, now_s):
            starving = min(order.late, key=lambda request: request.arrival_s)
            if now_s - starving.arrival_s > tuning.patience_s:
                prefill_s = queued.speed.costs.prefill_s(starving.prefill_tokens)
                self._count_starving(device, now_s, prefill_s)
                return [starving, *chosen]
        return chosen

    def _may_serve_starving(self, device: DeviceState, now_s: float) -> bool:
        return now_s >= self._no_starvation_until_s.get(device.number, -math.inf)

    def _count_starving(self, device: DeviceState, now_s: float, duration_s: float) -> None:
        pause_s = duration_s / self._tuning.starvation_share
        self._no_starvation_until_s[device.number] = now_s + pause_s

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the first planned turn, long enough for the ``window`` of lead."""
        plan = self._plan(device, work_of(device), now_s)
        if not plan.planned_turns:
            return None
        ranked = rank_planned_turns(plan.planned_turns, is_switching_dear=plan.switching.is_exposed)
        first = first_planned_turn(ranked)
        assert first is not None
        planned_turn, rule = first
        if plan.switching.is_exposed:
            planned_turn = turn_for_lead(ranked, device, self._tuning) or planned_turn
            rule = planned_turn.rule or rule
        elif short := self._short_turn(plan, device):
            planned_turn, rule = short, Rule.INTERLEAVED
        if math.isinf(planned_turn.tokens_in_time):
            self._count_starving(device, now_s, planned_turn.duration_s)
        else:
            self._planned[device.number] = plan  # for upcoming(), called next
        self._served_s[device.number, planned_turn.model] = now_s
        self._latest[device.number] = planned_turn.model
        chunk_tokens = self._chunk_tokens(planned_turn.model, rule, device, now_s)
        return Choice(planned_turn.model, planned_turn.quota_s, chunk_tokens, rule)

    def _short_turn(self, plan: _Plan, device: DeviceState) -> PlannedTurn | None:
        """Return a few steps of a model, None where turns must be longer.

        The model that has waited longest is next, unless one is due; a model with prompts gets
        every second turn. Models share the time as their targets need it, and have single steps
        while a prompt of another waits.
        """
        if len(plan.works) < 2 or not self._interleaves(device):
            return None
        works = {work.model.name: work for work in plan.works}
        prompted = {name for name, work in works.items() if work.num_waiting}
        turn = min(plan.planned_turns, key=attrgetter("due_in_s", "model"))
        if turn.due_in_s > self._tuning.pause_s:
            latest = self._latest.get(device.number)
            names = prompted - {latest} if latest not in prompted else set[str]()
            names = names or works.keys() - {latest}
            others = [turn for turn in plan.planned_turns if turn.model in names]
            turn = max(others, key=attrgetter("waited_s", "model"))
        work = works[turn.model]
        quota_s = min(self._tuning.pause_s, self._tuning.turn_max_s) / (len(works) - 1)
        if turn.model not in prompted:
            most = max(map(_needed_share, works.values()))
            quota_s *= 0.0 if prompted else _needed_share(work) / most
        quota_s = max(quota_s, work.step_s)
        return turn._replace(quota_s=quota_s, duration_s=quota_s)

    def _interleaves(self, device: DeviceState) -> bool:
        """Return whether turns are short: nothing has to move, and there is time for all."""
        if device.role is Role.PREFILL:
            return False
        for batch in (*device.working.values(), *device.queued.values()):
            if batch.is_background or device.missing(batch.model):
                return False
            if batch.step_s() > self._tuning.pause_s / 2:
                return False  # chunks of prompts would consist of the fixed part of their steps
        return load_of(device) <= self._tuning.full_load

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return the model of the first planned turn after the present turn."""
        planned = self._planned.pop(device.number, None)
        first = first_planned_turn(self._after(device, planned, now_s))
        return None if first is None else first[0].model

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Return the models of the planned turns after the present turn."""
        return [
            InLine(planned_turn.model, planned_turn.rule or rule, planned_turn.duration_s)
            for rule, group in self._after(device, None, now_s)
            for planned_turn in group
        ]

    def _after(self, device: DeviceState, planned: _Plan | None, now_s: float) -> Ranked:
        """Return the planned turns after the present turn; ``planned`` is the latest plan."""
        turn = device.turn
        on_turn = turn.model if turn else None
        if not (device.working.keys() | device.queued.keys()) - {on_turn}:
            return []
        works = planned.works if planned else work_of(device)
        works = [work for work in works if work.model.name != on_turn]
        if planned and planned.switching == switching_of(device, works, self._tuning):
            planned_turns = [
                planned_turn
                for planned_turn in planned.planned_turns
                if planned_turn.model != on_turn
            ]
            plan = planned._replace(planned_turns=planned_turns)
        else:
            plan = self._plan(device, works, now_s)
        left_s = device.turn_began_s + turn.quota_s - now_s if turn else 0.0
        return rank_planned_turns(plan.planned_turns, max(left_s, 0.0), plan.switching.is_exposed)

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """End a turn early for requests that arrived later and cannot wait for its end.

        A background turn ends at once for others. ``chunk_tokens`` is adapted to the batch.
        """
        began_s = device.turn_began_s
        chunk_tokens = self._chunk_tokens(turn.model, device.turn_rule, device, now_s)
        if chunk_tokens != turn.chunk_tokens:
            turn = replace(turn, chunk_tokens=chunk_tokens)
        left_s = planned_s = began_s + turn.quota_s - now_s
        if is_background_turn(device) and num_others(device):
            left_s = 0.0
        has_newcomers = False
        for model, came, prefill_s in prompts_since(device, began_s, besides=turn.model):
            has_newcomers = True
            ready_s, ttft_s = device.switch_s(model) + prefill_s, model.targets.ttft_s
            if ready_s > ttft_s:
                continue  # cannot be on time, even at once
            due_s = came[-1].counted_arrival_s + FIRST_TOKEN_SHARE * ttft_s
            left_s = min(left_s, max(due_s - now_s - ready_s, 0.0))
        if has_newcomers and self._interleaves(device):
            left_s = 0.0
        return turn if left_s >= planned_s else replace(turn, quota_s=now_s + left_s - began_s)

    def _chunk_tokens(
        self, name: str, rule: Rule | None, device: DeviceState, now_s: float
    ) -> int | None:
        """Return the limit of a step, in a turn by ``rule``, if whole prompts would delay answers.

        None if prompts may be prefilled at once.
        """
        batch = device.batches[name]
        if device.role is Role.DECODE:
            return chunk_tokens(batch)
        if rule is Rule.INTERLEAVED and not is_alone(name, device):
            return chunk_tokens(batch, self._tuning.pause_s)
        # If models take turns, answers pause anyway, and are ahead of their deadlines.
        if device.role is Role.PREFILL or not is_alone(name, device):
            return None
        expired_s = self._tuning.expired_share * batch.model.targets.ttft_s
        return chunk_tokens(batch) if would_delay_answers(batch, now_s, expired_s) else None

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        """Choose a decode device by load as for a new request, or stay.

        Also applies to answers whose prompts a decode device has prefilled.
        """
        assert request.device is not None
        device = state.devices[request.device]
        if device.role is Role.DECODE or not (device.migrates_out or state.is_split):
            return None
        others = [host for host in state.decode_hosts(request.model) if not host.migrates_out]
        roomy = [other for other in others if other is device or admits(other, request)]
        if not roomy:
            return None
        return choose(request, roomy, Loads(), self._answers_home, self._tuning)[0]

    def _migrations(self, state: State, loads: Loads) -> Iterable[Placement]:
        """Move models that a full device has not begun to devices with enough free load.

        A moved model does not move back, because the other device does not become full.
        """
        full_load = self._tuning.full_load
        for device in [device for device in state.devices.values() if device.queued]:
            for name in [name for name in device.queued if name not in device.working]:
                batch = device.queued[name]
                able = able_devices(batch.model, state.prefill_hosts(batch.model))
                others = [other for other in able if other is not device]
                if loads.of(device) <= full_load or not others:
                    continue
                target = min(others, key=loads.of)
                load = queue_load(batch, target)
                requests = list(batch.requests.values())
                if loads.of(target) + load > full_load or not admits(target, requests[0]):
                    continue
                loads.move(queue_load(batch, device), load, device, target)
                self._home[name] = target.number
                for request in requests:
                    if admits(target, request):
                        yield Placement(request, target, Rule.MIGRATED_OFF_FULL)

    def _moves_for_kv(self, state: State, loads: Loads) -> Iterable[Placement]:
        """Place requests waiting for KV memory on devices with memory that may have the model."""
        for request, devices in waiting_for_kv(state):
            name = request.model.name
            # By number of models, not by load, which is slower: called often while requests wait.
            target = min(
                devices, key=lambda device: (name not in device.working, len(device.working))
            )
            if name in target.working:
                is_wanted = loads.of(target) <= self._tuning.full_load and admits(target, request)
            else:
                is_wanted = is_worth_a_copy(request, target, loads, self._tuning)
            if is_wanted:
                yield Placement(request, target, Rule.MIGRATED_FOR_KV)
                loads.forget(target)

    def _plan(self, device: DeviceState, works: list[BatchWork], now_s: float) -> _Plan:
        tuning = self._tuning
        switching = switching_of(device, works, tuning)
        # If copies are hidden by other turns, beginning another model costs little.
        is_full = switching.is_exposed and bool(device.working)
        is_full = is_full and load_of(device) > tuning.full_load
        may_serve_starving = self._may_serve_starving(device, now_s)
        planned_turns = []
        for work in works:
            waited_s = self._waited_s(device, work, now_s)
            switch_s = device.switch_s(work.model)
            migrates_out = device.role is Role.PREFILL and work.num_waiting == len(work.requests)
            planned_turn = plan_turn(
                work, now_s, switch_s, switching, tuning, waited_s, prefills_only=migrates_out
            )
            if is_full and work.is_new and planned_turn.due_in_s > _latest_start_s(work, tuning):
                planned_turn = planned_turn._replace(due_in_s=math.inf, rule=Rule.NOT_YET_BEGUN)
            is_starving = waited_s > tuning.patience_s and not work.is_background
            if may_serve_starving and is_starving:
                # Starving: the longest waiting model first, and never put off.
                planned_turn = planned_turn._replace(
                    due_in_s=-waited_s, tokens_in_time=math.inf, rule=Rule.STARVING, is_ahead=False
                )
            planned_turns.append(planned_turn)
        return _Plan(works, switching, planned_turns)

    def _waited_s(self, device: DeviceState, work: BatchWork, now_s: float) -> float:
        """Return the seconds since the last turn, or since the oldest request if later."""
        served_s = self._served_s.get((device.number, work.model.name), -math.inf)
        if work.requests[0].arrival_s <= served_s:
            return now_s - served_s
        oldest_s = min(request.arrival_s for request in work.requests)
        return now_s - max(oldest_s, served_s)


def _needed_share(work: BatchWork) -> float:
    """Return the share of a device's time that a model's answers need."""
    return work.step_s / work.model.targets.tbt_s


def _latest_start_s(work: BatchWork, tuning: Tuning) -> float:
    return tuning.latest_start_share * work.model.targets.ttft_s


def turn_for_lead(ranked: Ranked, device: DeviceState, tuning: Tuning) -> PlannedTurn | None:
    """Return a turn of the present model before the first ranked turn, None if not useful.

    The present model is resident and ahead, but not far enough for the first turn; all turns that
    can be on time still can be after the returned turn. Call this where switches are exposed.

    A model whose targets are short is at its ``window`` of lead soon, but the next model's turn
    with both switches takes longer. While the next turns can wait, the present model decodes on,
    until its lead covers the time without it.
    """
    by_rule = dict(ranked)
    kept = by_rule[Rule.DEADLINE]
    following = next(iter(kept or by_rule[Rule.PUT_OFF]), None)
    present = next((turn for turn in by_rule[Rule.AHEAD] if _is_resident(turn, device)), None)
    if following is None or present is None:
        return None
    batch, other = device.batches[present.model], device.batches[following.model]
    absence_s = following.duration_s + _return_s(batch.model, other.model, device)
    lacking_s = absence_s - present.due_in_s
    quota_s = min(_decode_s(batch, lacking_s), _slack_s(kept), tuning.turn_max_s)
    if quota_s < tuning.turn_min_s:
        return None
    return present._replace(quota_s=quota_s, duration_s=quota_s, rule=Rule.GATHERS_LEAD)


def _is_resident(planned_turn: PlannedTurn, device: DeviceState) -> bool:
    batch = device.working.get(planned_turn.model)
    return batch is not None and not device.missing(batch.model)


def _return_s(model: Model, other: Model, device: DeviceState) -> float:
    """Return the seconds to copy what ``model`` lacks after a turn of ``other``."""
    short_bytes = device.total_bytes(model) + device.total_bytes(other) - device.up.capacity_bytes
    return min(max(short_bytes, 0), model.weight_bytes) / device.weights_bytes_per_s(model)


def _decode_s(batch: Batch, more_lead_s: float) -> float:
    tbt_s, step_s = batch.model.targets.tbt_s, batch.step_s()
    return more_lead_s / max(tbt_s - step_s, LEAST_GAIN_SHARE * tbt_s) * step_s


def _slack_s(kept: Sequence[PlannedTurn]) -> float:
    """Return the longest delay of the turns, in order, without a late start."""
    slack_s, start_s = math.inf, 0.0
    for turn in kept:
        slack_s = min(slack_s, turn.due_in_s - start_s)
        start_s += turn.duration_s
    return slack_s
