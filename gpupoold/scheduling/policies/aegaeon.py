"""Aegaeon's policy (SOSP 2025, section 4): grouped prefill, weighted round-robin decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpupoold.domain import Role
from gpupoold.scheduling.events import Turn
from gpupoold.scheduling.policies.base import Choice, InLine, Placement, Policy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import DeviceState, Model, Request, RequestPhase, State

MAX_GROUP_SIZE = 8
QUOTA_MAX_S = 4.0

MIN_ALPHA = 0.5
# Less than a nanosecond of switching counts as none, because quotients would underflow.
_LEAST_SWITCH_S = 1e-9


@dataclass(slots=True)
class _Group:
    """Prefill jobs of one model. ``size`` counts all jobs that ever joined (section 4.2)."""

    model: Model
    size: int = 0
    requests: dict[str, Request] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.size += 1
        self.requests[request.id] = request

    def ready(self, device: DeviceState) -> list[Request]:
        """Return the requests that a device has, sent or ready to send."""
        return [each for each in self.requests.values() if not device.is_waiting_for_kv(each)]

    def prefill_s(self, device: DeviceState) -> float:
        """Return the seconds to prefill a device's requests one by one."""
        prefill_s = device.speed(self.model).costs.prefill_s
        return sum(prefill_s(request.context_tokens) for request in self.ready(device))


class GroupedPrefill:
    """Algorithm 1: a queue of groups per prefill device."""

    def __init__(self) -> None:
        self._queues: dict[int, list[_Group]] = {}
        self._group_of: dict[str, _Group] = {}

    def dispatch(self, request: Request, devices: list[DeviceState]) -> tuple[DeviceState, Rule]:
        """Choose the device of a new request: the first group that takes it, or a new group.

        A new group goes to the end of the least loaded queue.
        """
        for device in devices:
            for group in self._queue(device):
                if group.model is request.model and group.size < MAX_GROUP_SIZE:
                    self._join(request, group)
                    return device, Rule.GROUPED
        chosen = min(devices, key=lambda device: (self._load_s(device), device.number))
        group = _Group(request.model)
        self._queue(chosen).append(group)
        self._join(request, group)
        return chosen, Rule.SHORTEST_QUEUE

    def forget(self, request: Request) -> None:
        """Remove a request that has been prefilled or has ended."""
        group = self._group_of.pop(request.id, None)
        if group is not None:
            del group.requests[request.id]

    def front(self, device: DeviceState) -> _Group | None:
        """Return the group to work on; finished groups are dropped."""
        queue = self._queue(device)
        while queue and not queue[0].requests:
            queue.pop(0)
        return next((group for group in queue if group.ready(device)), None)

    def turn_of(self, device: DeviceState) -> tuple[int, float]:
        """Return the requests that joined the first group, and the seconds to prefill the rest.

        Adjacent groups of the same model count together.
        """
        groups = [group for group in self._queue(device) if group.ready(device)]
        of_model = [*itertools.takewhile(lambda group: group.model is groups[0].model, groups)]
        num_joined = sum(group.size for group in of_model)
        return num_joined, sum(group.prefill_s(device) for group in of_model)

    def next_model(self, device: DeviceState) -> str | None:
        """Return the model of the next group of another model."""
        return next(iter(self.next_models(device)), None)

    def next_models(self, device: DeviceState) -> list[str]:
        """Return the models of the groups after the present one, in order."""
        current = device.turn.model if device.turn else None
        waiting = [group.model.name for group in self._queue(device) if group.ready(device)]
        return [name for name in dict.fromkeys(waiting) if name != current]

    def _queue(self, device: DeviceState) -> list[_Group]:
        return self._queues.setdefault(device.number, [])

    def _join(self, request: Request, group: _Group) -> None:
        group.add(request)
        self._group_of[request.id] = group

    def _load_s(self, device: DeviceState) -> float:
        total_s = 0.0
        on_device = device.turn.model if device.turn else None
        for group in self._queue(device):
            if not group.requests:
                continue
            prefill_s = device.speed(group.model).costs.prefill_s
            total_s += sum(prefill_s(request.prompt_tokens) for request in group.requests.values())
            if group.model.name != on_device:
                total_s += group.model.weight_bytes / device.bandwidth_bytes_per_s
            on_device = group.model.name
        return total_s


@dataclass(slots=True)
class _WorkList:
    """The batches of one decode device in order, and the batches left in this round.

    ``last`` is the model of the latest turn.
    """

    order: list[str] = field(default_factory=list)
    round: list[str] = field(default_factory=list)
    quotas_s: dict[str, float] = field(default_factory=dict)
    last: str | None = None


class WeightedDecode:
    """Algorithm 2: rounds over a device's batches with the quotas of equations 2 and 3."""

    def __init__(self, quota_max_s: float = QUOTA_MAX_S) -> None:
        self.quota_max_s = quota_max_s
        self._lists: dict[int, _WorkList] = {}

    def dispatch(self, request: Request, devices: list[DeviceState]) -> DeviceState:
        """Choose a device as in algorithm 1: a batch of the model with KV memory, else the
        shortest list.
        """
        for device in devices:
            if _has_room(request, device):
                return device
        return min(devices, key=lambda device: (len(_models_on(device)), device.number))

    def next_turn(self, device: DeviceState) -> Choice | None:
        """Return the next batch of the round, or of a new round at the end.

        Skips the latest turn's batch if there is another batch, which was announced as the next.
        """
        work = self._list(device)
        if not work.order:
            return None
        if not set(work.round) - {work.last}:
            if work.order[0] == work.last:
                work.order.append(work.order.pop(0))
            self._start_round(device, work)
        name = next((name for name in work.round if name != work.last), work.round[0])
        work.round.remove(name)
        return Choice(name, work.quotas_s[name], rule=Rule.ROUND)

    def began(self, device: DeviceState, model: str) -> None:
        """Record that a turn of this model begins, to prefill or to decode."""
        self._list(device).last = model

    def upcoming(self, device: DeviceState) -> str | None:
        """Return the next model of the round, or the first of the next round."""
        return next((request.model for request in self.line(device)), None)

    def line(self, device: DeviceState) -> list[InLine]:
        """Return the rest of the round, then the next round."""
        work = self._list(device)
        current = device.turn.model if device.turn else None
        names = [name for name in dict.fromkeys([*work.round, *work.order]) if name != current]
        return [InLine(name, Rule.ROUND, work.quotas_s.get(name)) for name in names]

    def _list(self, device: DeviceState) -> _WorkList:
        work = self._lists.setdefault(device.number, _WorkList())
        work.round = [name for name in work.round if name in device.working]
        work.order = [name for name in work.order if name in device.working]
        work.order += [name for name in device.working if name not in work.order]
        return work

    def _start_round(self, device: DeviceState, work: _WorkList) -> None:
        work.round = list(work.order)
        batches = [device.batches[name] for name in work.order]
        if len(batches) == 1:
            work.quotas_s = {work.order[0]: self.quota_max_s}
            return
        loads = [TurnLoad(batch.model.targets.tbt_s, batch.step_s()) for batch in batches]
        total_bytes = sum(batch.model.weight_bytes for batch in batches)
        switching_s = total_bytes / device.bandwidth_bytes_per_s
        quotas_s = round_quotas_s(loads, switching_s, self.quota_max_s)
        work.quotas_s = dict(zip(work.order, quotas_s, strict=True))


class AegaeonPolicy(Policy):
    """Devices split into prefill and decode at the first tick (section 4.1 of the paper).

    Before the first tick, and with one device only, devices do both.
    """

    name = "aegaeon"

    def __init__(self, num_prefill: int, quota_max_s: float = QUOTA_MAX_S) -> None:
        self._num_prefill = num_prefill
        self._prefill = GroupedPrefill()
        self._decode = WeightedDecode(quota_max_s)
        self._num_joined: dict[int, int] = {}  # by device: requests counted in the turn's length

    def set_quota_max(self, quota_max_s: float) -> None:
        """Set the longest turn; quotas of the present round stay."""
        self._decode.quota_max_s = quota_max_s

    def arrived(self, request: Request, state: State) -> None:
        """Drop the request's group, if it lost its device; ``assign`` dispatches the request."""
        self._prefill.forget(request)

    def ended(self, request: Request, state: State) -> None:
        self._prefill.forget(request)

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        """Place each held request in order of arrival (algorithm 1)."""
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                yield Placement(request, *self._prefill.dispatch(request, devices))

    def send(self, device: DeviceState, state: State, now_s: float) -> Iterable[Request]:
        """Return the requests of the first group, once its turn has come."""
        group = self._prefill.front(device)
        if group is None or device.turn is None or device.turn.model != group.model.name:
            return []
        return [
            request for request in group.requests.values() if request.phase is RequestPhase.QUEUED
        ]

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        self._prefill.forget(request)
        devices = [d for d in state.decode_hosts(request.model) if not d.migrates_out]
        return self._decode.dispatch(request, devices) if devices else None

    def roles(self, state: State, now_s: float) -> Iterable[tuple[DeviceState, Role]]:
        """Return the prefill role for the first ``num_prefill`` devices; at least one decodes."""
        devices = [state.devices[number] for number in sorted(state.devices)]
        if len(devices) < 2:
            return [(device, Role.MIXED) for device in devices]
        num_prefill = min(self._num_prefill, len(devices) - 1)
        prefilling, decoding = devices[:num_prefill], devices[num_prefill:]
        roles = [(device, Role.PREFILL) for device in prefilling]
        return [*roles, *((device, Role.DECODE) for device in decoding)]

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        """Return the first group with its prefill time, or the next batch of the decode round.

        The role does not matter: a device whose role has changed finishes its work.
        """
        group = self._prefill.front(device)
        if group is None:
            choice = self._decode.next_turn(device)
        else:
            self._num_joined[device.number], prefill_s = self._prefill.turn_of(device)
            choice = Choice(group.model.name, prefill_s, rule=Rule.PREFILL_FIRST)
        if choice is not None:
            self._decode.began(device, choice.model)
        return choice

    def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
        """Prolong a prefill turn by the prompts that have joined its group.

        A prefill turn is not prolonged for answers, which continue only while no other model waits.
        """
        group = self._prefill.front(device)
        if device.turn_rule is not Rule.PREFILL_FIRST or group is None:
            return turn
        if group.model.name != turn.model:
            return turn
        before = self._num_joined.get(device.number, 0)
        self._num_joined[device.number], prefill_s = self._prefill.turn_of(device)
        quota_s = now_s - device.turn_began_s + prefill_s
        if self._num_joined[device.number] <= before or quota_s <= turn.quota_s:
            return turn
        return replace(turn, quota_s=quota_s)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        """Return the model of the next group, or of the next batch."""
        return self._prefill.next_model(device) or self._decode.upcoming(device)

    def line(self, device: DeviceState, state: State, now_s: float) -> list[InLine]:
        """Return the models of the groups, then the rest of the round."""
        first = [InLine(n, Rule.PREFILL_FIRST) for n in self._prefill.next_models(device)]
        names = {request.model for request in first}
        return first + [
            request for request in self._decode.line(device) if request.model not in names
        ]


def _has_room(request: Request, device: DeviceState) -> bool:
    model = request.model
    moving = [request for request in device.moving.values() if request.model is model]
    batch = device.batches[model.name]
    if not batch.requests and not moving:
        return False
    tokens = batch.context_tokens + sum(each.context_tokens for each in (*moving, request))
    return tokens * model.kv_bytes_per_token <= device.up.capacity_bytes - model.weight_bytes


def _models_on(device: DeviceState) -> set[str]:
    return {*device.working, *(request.model.name for request in device.moving.values())}


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """A batch of the round: its token target and its step time in seconds."""

    tbt_s: float
    step_s: float

    @property
    def tokens_per_target(self) -> float:
        """``n = d/t``: steps of the batch in the time of one token target."""
        return self.tbt_s / self.step_s


def round_quotas_s(loads: Sequence[TurnLoad], switch_s: float, quota_max_s: float) -> list[float]:
    """Return each batch's quota in seconds for a round that spends ``switch_s`` on switching.

    ``alpha = max(c/(min n * Q_MAX) + sum 1/n, 0.5)``, ``q_i = c/(n_i * (alpha - sum 1/n))``. With
    ``c = 0`` the formula is 0/0 or 0: then switching is free, and every batch gets the time of one
    token target split by need, ``q_i = d_min * (1/n_i) / max(sum 1/n, 0.5)``, so that short turns
    can meet every deadline.
    """
    counts = [load.tokens_per_target for load in loads]
    need = sum(1 / count for count in counts)
    if switch_s < _LEAST_SWITCH_S:
        shortest_s = min(load.tbt_s for load in loads)
        return [
            max(load.step_s, shortest_s / count / max(need, MIN_ALPHA))
            for load, count in zip(loads, counts, strict=True)
        ]
    # alpha - need, written so that a small c is not lost beside a large need.
    spare = max(switch_s / (min(counts) * quota_max_s), MIN_ALPHA - need)
    return [switch_s / (count * spare) for count in counts]
