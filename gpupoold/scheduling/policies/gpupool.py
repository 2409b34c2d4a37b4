"""The default policy: every device prefills and decodes; see :mod:`.visits` for who runs when.

A model is served where it is being served; else on the device with the least to do, at
home among equals. What a device has not begun with stays with the daemon, and goes to
another device that gets less to do. A device that is full does not begin with one more
model until it must, to be in time: perhaps another will be free before. A model that
takes more than a device gets a second one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from gpupoold.scheduling.policies.base import Choice, SimplePolicy
from gpupoold.scheduling.policies.visits import (
    Tuning,
    Visit,
    Work,
    batch_load,
    kv_load,
    load_of,
    order_visits,
    own_load,
    plan_visit,
    switching_of,
    work_of,
)
from gpupoold.scheduling.state import Device, Model, Request, State

# Loads are shares of a device; a smaller difference is no reason to leave home or to move.
_LOAD_GRAIN = 0.1
# When a turn is cut short for a newcomer: so much of its TTFT may have gone by the start.
_START_SHARE = 0.7


class GpupoolPolicy(SimplePolicy):
    """See the module."""

    name = "gpupool"

    def __init__(self, tuning: Tuning | None = None) -> None:
        self._tuning = tuning or Tuning()
        self._home: dict[str, int] = {}
        self._visited_s: dict[tuple[int, str], float] = {}
        self._no_mercy_until_s: dict[int, float] = {}

    def assign(self, state: State, now_s: float) -> Iterable[tuple[Request, Device]]:
        """Held requests; and queued ones that have it better elsewhere."""
        for request in list(state.held.values()):
            devices = state.hosts(request.model)
            if devices:
                yield request, self._choose(request.model, devices)
        yield from self._moves(state)

    def send(self, device: Device, state: State, now_s: float) -> Iterable[Request]:
        """Those whose model has work there already, or has its turn."""
        on_turn = device.turn.model if device.turn else None
        return [
            one
            for one in device.queued.values()
            if one.model.name == on_turn or one.model.name in device.working
        ]

    def next_turn(self, device: Device, state: State, now_s: float) -> Choice | None:
        """The first visit, for as long as it takes to be ``window`` ahead."""
        works = work_of(device)
        if not works:
            return None
        visit = self._ordered(device, works, now_s, 0.0)[0]
        if math.isinf(visit.tokens_in_time):
            pause_s = visit.duration_s / self._tuning.mercy_share
            self._no_mercy_until_s[device.number] = now_s + pause_s
        self._visited_s[device.number, visit.model] = now_s
        return Choice(visit.model, visit.quota_s)

    def upcoming(self, device: Device, state: State, now_s: float) -> str | None:
        """The first visit after the present turn."""
        turn = device.turn
        works = [w for w in work_of(device) if turn is None or w.model.name != turn.model]
        if not works:
            return None
        ends_s = device.turn_began_s + turn.quota_s if turn else now_s
        return self._ordered(device, works, now_s, max(ends_s - now_s, 0.0))[0].model

    def revise(self, device: Device, state: State, now_s: float) -> float | None:
        """A turn ends early for whoever came after it began and cannot wait for its end."""
        turn, began_s = device.turn, device.turn_began_s
        if turn is None or not _has_prompts(device, besides=turn.model):
            return None
        left_s = planned_s = began_s + turn.quota_s - now_s
        for work in work_of(device):
            if work.model.name == turn.model:
                continue
            came_s = [one.arrival_s for one in work.requests if not one.num_tokens]
            if max(came_s, default=-math.inf) <= began_s:
                continue
            ready_s = device.switch_s(work.model) + work.prefill_s
            start_in_s = came_s[-1] + _START_SHARE * work.model.targets.ttft_s - now_s - ready_s
            left_s = min(left_s, max(start_in_s, 0.0))
        return None if left_s >= planned_s else now_s + left_s - began_s

    def _choose(self, model: Model, devices: list[Device]) -> Device:
        """Where the model is served; but a full device gets no more of it while another has room.

        A second device for a model costs a copy of its weights and a smaller batch on each,
        so requests join the larger batch as long as its device keeps up.
        """
        full_load = self._tuning.full_load
        serving = [one for one in devices if _has_work(model, one)]
        keeping_up = [one for one in serving if load_of(one) <= full_load]
        if keeping_up:
            return max(keeping_up, key=lambda one: (_num_of(model, one), -one.number))
        if serving and not any(_is_mostly(model, one) for one in serving):
            return min(serving, key=lambda one: (load_of(one), one.number))
        home = self._home.get(model.name)
        chosen = min(devices, key=lambda one: _rank(one, model, home))
        if serving and load_of(chosen) + own_load(model) > self._tuning.second_device_load:
            return min(serving, key=lambda one: (load_of(one), one.number))
        self._home[model.name] = chosen.number
        return chosen

    def _moves(self, state: State) -> Iterable[tuple[Request, Device]]:
        """Models that their device has not begun with go where the load would be less."""
        sources = [one for one in state.devices.values() if one.queued]
        if not sources:
            return
        loads = {device.number: load_of(device) for device in state.devices.values()}
        for device in sources:
            for model in {one.model.name: one.model for one in device.queued.values()}.values():
                others = [number for number in model.hosts if number != device.number]
                if model.name in device.working or not others:
                    continue
                number = min(others, key=lambda one: (loads[one], one))
                own = own_load(model)
                full_load = self._tuning.full_load
                if loads[device.number] <= full_load or loads[number] + own > full_load:
                    continue
                loads[number] += own
                loads[device.number] -= own
                self._home[model.name] = number
                for request in [one for one in device.queued.values() if one.model is model]:
                    yield request, state.devices[number]

    def _ordered(
        self, device: Device, works: list[Work], now_s: float, start_in_s: float
    ) -> list[Visit]:
        """The visits to make, the next one first."""
        tuning = self._tuning
        switching = switching_of(device, works, tuning)
        # Where the next model comes in meanwhile, beginning with one more costs little.
        is_full = switching.is_exposed and bool(device.working)
        is_full = is_full and load_of(device) > tuning.full_load
        visits = []
        for work in works:
            waited_s = self._waited_s(device, work, now_s)
            switch_s = device.switch_s(work.model)
            visit = plan_visit(work, now_s, switch_s, switching, tuning, waited_s)
            is_new = work.model.name not in device.working
            if is_full and is_new and visit.due_in_s > _latest_start_s(work, tuning):
                visit = replace(visit, due_in_s=math.inf)
            if waited_s > tuning.patience_s and now_s >= self._no_mercy_until(device):
                # The longest waiting first, and never put off.
                visit = replace(visit, due_in_s=-waited_s, tokens_in_time=math.inf)
            visits.append(visit)
        return order_visits(visits, start_in_s, is_switching_dear=switching.is_exposed)

    def _no_mercy_until(self, device: Device) -> float:
        return self._no_mercy_until_s.get(device.number, -math.inf)

    def _waited_s(self, device: Device, work: Work, now_s: float) -> float:
        """Since the last visit, or since the oldest request came if that was later."""
        oldest_s = min(request.arrival_s for request in work.requests)
        visited_s = self._visited_s.get((device.number, work.model.name), -math.inf)
        return now_s - max(oldest_s, visited_s)


def _has_prompts(device: Device, besides: str) -> bool:
    if any(b.num_waiting for name, b in device.working.items() if name != besides):
        return True
    return any(request.model.name != besides for request in device.queued.values())


def _latest_start_s(work: Work, tuning: Tuning) -> float:
    return tuning.latest_start_share * work.model.targets.ttft_s


def _has_work(model: Model, device: Device) -> bool:
    if model.name in device.working:
        return True
    return any(request.model is model for request in device.queued.values())


def _is_mostly(model: Model, device: Device) -> bool:
    """Whether the model is half of what the device has to do, so that others leaving is no help."""
    batch = device.working.get(model.name)
    if batch is None:
        return False
    return batch_load(batch) + kv_load(batch, device) >= 0.5 * load_of(device)


def _num_of(model: Model, device: Device) -> int:
    batch = device.working.get(model.name)
    queued = sum(request.model is model for request in device.queued.values())
    return queued + (len(batch.requests) if batch else 0)


def _rank(device: Device, model: Model, home: int | None) -> tuple[int, bool, bool, float, int]:
    load = load_of(device)
    return (
        round(load / _LOAD_GRAIN),
        device.number != home,
        device.missing(model) > 0,
        load,
        device.number,
    )
