"""The scheduling core: one state, events in, actions out.

The daemon and the simulator run this object. The core does no I/O and reads no clock. The policy
decides; only the core changes the state, so a policy cannot corrupt the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import admit, admits
from gpupoold.scheduling.events import Action, ChangeRole, Migrate, Send, StartTurn, Turn
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import (
    Batch,
    DeviceState,
    Model,
    Request,
    RequestPhase,
    State,
    Trigger,
    phase_after,
)

_STEP_SMOOTHING = 0.1


class UnknownName(KeyError):
    """An event names an unknown model or device."""


class Core:
    """Events in, actions out; see :meth:`handle`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state = State()
        self._actions: list[Action] = []
        self._to_plan: dict[int, None] = {}  # a set that keeps its order
        self._prefilled: list[Request] = []
        self._has_arrivals = False  # requests to assign to devices
        self._has_changed = False  # devices, or memory on devices, as far as requests may benefit

    def handle(self, events: Iterable[e.Event], now_s: float) -> list[Action]:
        """Apply events and decide; the actions are to be carried out in order.

        Events about requests, turns and devices that have ended are ignored, because messages may
        cross. ``now_s`` never decreases.

        Raises:
            UnknownName: a model or device was never added.
            ValueError: a request arrived with the id of a live request.
        """
        self._actions = []
        for event in events:
            _HANDLERS[type(event)](self, event, now_s)
        if self._prefilled:
            requests, self._prefilled = self._prefilled, []
            for request in requests:
                self._go_on(request, now_s)
        if self._has_changed:
            self._migrate_out(now_s)
        if self._has_arrivals or self._has_changed:
            self._has_arrivals = self._has_changed = False
            # Freed KV memory goes to waiting requests before new requests.
            for number in self._to_plan:
                if number in self.state.devices:
                    admit(self.state.devices[number], now_s)
            self._assign(now_s)
        if self._to_plan:
            numbers, self._to_plan = self._to_plan, {}
            for number in numbers:
                device = self.state.devices.get(number)
                if device is not None:
                    self._plan(device, now_s)
        return self._actions

    def _model_added(self, event: e.ModelAdded, now_s: float) -> None:
        known = self.state.models.get(event.model)
        if known is None:
            self.state.models[event.model] = Model(
                event.model,
                event.targets,
                event.weight_bytes,
                event.kv_bytes_per_token,
                event.costs,
                event.generates,
            )
            return
        known.targets, known.costs = event.targets, event.costs
        known.revision += 1
        known.weight_bytes = event.weight_bytes
        known.kv_bytes_per_token = event.kv_bytes_per_token
        known.generates = event.generates

    def _targets_changed(self, event: e.TargetsChanged, now_s: float) -> None:
        model = self._model(event.model)
        model.targets = event.targets
        model.revision += 1

    def _model_removed(self, event: e.ModelRemoved, now_s: float) -> None:
        model = self.state.models.pop(event.model, None)
        if model is None:
            return
        for request in [r for r in self.state.requests.values() if r.model is model]:
            self._ended(e.Ended(request.id, is_complete=False), now_s)
        for device in self.state.hosts(model):
            self._take_off(device, model)
        for device in self.state.devices.values():
            device.missing_bytes.pop(model.name, None)
        self.state.lengths.forget(model.name)
        self.state.cached.forget(model.name)

    def _device_up(self, event: e.DeviceUp, now_s: float) -> None:
        self._device_down(e.DeviceDown(event.device), now_s)
        self.state.devices[event.device] = DeviceState(event)
        self._has_changed = True

    def _device_down(self, event: e.DeviceDown, now_s: float) -> None:
        device = self.state.devices.pop(event.device, None)
        if device is None:
            return
        for model in self.state.models.values():
            model.hosts.discard(device.number)
        for request in [r for r in self.state.requests.values() if r.device == device.number]:
            self._lose_device(request, now_s)
        self._has_changed = True  # other devices may have to take its role

    def _role_set(self, event: e.RoleSet, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is not None:
            device.role, device.is_role_fixed = event.role, event.is_fixed
            self._has_changed = True

    def _drain_set(self, event: e.DrainSet, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is None:
            return
        device.is_draining = event.is_draining
        self._has_changed = True
        if not event.is_draining:
            return
        # Requests that were not sent to the device yet can go to other devices.
        lines = device.waiting_for_kv.values()
        waiting = [request for line in lines for request in line.requests.values()]
        for request in [*device.queued_requests(), *waiting]:
            device.dequeue(request)
            self._lose_device(request, now_s)
            self._to_plan[device.number] = None

    def _bandwidth_measured(self, event: e.BandwidthMeasured, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is not None:
            device.bandwidth_bytes_per_s = event.bandwidth_bytes_per_s

    def _far_snapshots(self, event: e.FarSnapshots, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is not None:
            device.far = frozenset(event.models)

    def _quota_max_set(self, event: e.QuotaMaxSet, now_s: float) -> None:
        self.policy.set_quota_max(event.quota_max_s)

    def _tick(self, event: e.Tick, now_s: float) -> None:
        for device, role in self.policy.roles(self.state, now_s):
            if role is not device.role and not device.is_role_fixed:
                device.role = role
                self._actions.append(ChangeRole(device.number, role))
                self._has_changed = True
        for name, home in self.policy.homes(self.state, now_s).items():
            self.state.models[name].home = home
        for request, target in self.policy.rebalance(self.state, now_s):
            self._try_migrate(request, target, Rule.REBALANCED)
        self._migrate_out(now_s)

    def _hosted(self, event: e.Hosted, now_s: float) -> None:
        model, device = self._model(event.model), self._device(event.device)
        model.hosts.add(device.number)
        model.set_costs(device.up.kind, event.costs or model.costs)
        if model.name not in device.batches:
            device.batches[model.name] = Batch(model, kind=device.up.kind)
        self._has_changed = True

    def _unhosted(self, event: e.Unhosted, now_s: float) -> None:
        model = self.state.models.get(event.model)
        device = self.state.devices.get(event.device)
        if model is None or device is None or device.number not in model.hosts:
            return
        requests = [request for request in self.state.requests.values() if request.model is model]
        lost = [request for request in requests if request.device == device.number]
        for request in lost:
            _remove(request, device)
        self._take_off(device, model)
        self._has_changed = True  # the model's only host may now be a draining device
        for request in lost:
            self._lose_device(request, now_s)

    def _hostable(self, event: e.Hostable, now_s: float) -> None:
        self._model(event.model).hostable = frozenset(event.devices)

    def _arrived(self, event: e.Arrived, now_s: float) -> None:
        if event.request_id in self.state.requests:
            raise ValueError(f"request {event.request_id} arrived, but is live already")
        request = Request(
            event.request_id,
            self._model(event.model),
            event.arrival_s,
            event.prompt_tokens,
            event.output_tokens,
            num_tokens=event.num_tokens,
            expected_tokens=self._expected_tokens(event),
            priority=event.priority,
            max_tokens=event.max_tokens,
            ttft_s=event.ttft_s,
            cached_tokens=self.state.cached.predict(event.model, event.prompt_tokens),
        )
        self.state.requests[request.id] = request
        self._hold(request, now_s)

    def _expected_tokens(self, event: e.Arrived) -> int:
        lengths = self.state.lengths
        if event.num_tokens:
            tokens = lengths.predict_again(event.model, event.prompt_tokens, event.num_tokens)
        else:
            tokens = lengths.predict(event.model, event.prompt_tokens)
        return round(tokens if event.max_tokens is None else min(tokens, event.max_tokens))

    def _learn_length(self, request: Request) -> None:
        """Record the length of a complete answer.

        An answer cut off by its limit before the expected length is left out, because its natural
        length is unknown.
        """
        lengths, name = self.state.lengths, request.model.name
        limit = math.inf if request.max_tokens is None else request.max_tokens
        is_cut_off = request.num_tokens >= limit
        if is_cut_off and limit < lengths.predict(name, request.prompt_tokens):
            return
        lengths.observe(name, request.prompt_tokens, request.num_tokens)

    def _stepped(self, event: e.Stepped, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is None or event.model not in device.batches:
            return
        batch = device.batches[event.model]
        if event.step_s is not None:
            _learn_step(batch, event)
        if not event.num_tokens:
            return
        for request_id in event.request_ids:
            request = batch.requests.get(request_id)
            if request is not None:
                self._tokens(request, batch, event.num_tokens)

    def _tokens(self, request: Request, batch: Batch, num_tokens: int) -> None:
        if request.phase is RequestPhase.SENT:
            batch.prefilled(request)
            self._prefilled.append(request)
            assert request.device is not None
            if batch.model.name in self.state.devices[request.device].queued:
                self._to_plan[request.device] = None  # the next prefills may be due
        _move(request, Trigger.TOKEN)
        request.num_tokens += num_tokens
        batch.grow(num_tokens)

    def _go_on(self, request: Request, now_s: float) -> None:
        """Choose the device to decode a request with its first token, unless it has ended."""
        if request.phase is not RequestPhase.DECODING or request.id not in self.state.requests:
            return
        target = self.policy.first_token(request, self.state, now_s)
        if target is not None:
            self._try_migrate(request, target, Rule.ANSWERS_ELSEWHERE)

    def _migrate_out(self, now_s: float) -> None:
        """Migrate answers from devices that should have none, as far as memory allows."""
        for device in self.state.devices.values():
            if device.migrates_out:
                for batch in list(device.working.values()):
                    self._migrate_batch_out(batch, now_s)

    def _migrate_batch_out(self, batch: Batch, now_s: float) -> None:
        """Migrate the answers of a model away.

        After an answer that had to stay, later answers that need as much KV memory stay too, so
        that full devices are not asked for each of many answers.
        """
        stayed_bytes, stayed_s = math.inf, math.inf
        for request in list(batch.requests.values()):
            need_bytes = request.kv_need_bytes
            if need_bytes >= stayed_bytes and request.arrival_s >= stayed_s:
                continue
            self._go_on(request, now_s)
            if request.phase is RequestPhase.DECODING:
                stayed_bytes, stayed_s = need_bytes, request.arrival_s

    def _try_migrate(self, request: Request, target: DeviceState, rule: Rule) -> None:
        """Migrate a decoding request, unless to its own device or to a device without memory."""
        is_elsewhere = target.number != request.device
        if request.phase is RequestPhase.DECODING and is_elsewhere and admits(target, request):
            self._migrate(request, target, rule)

    def _migrate(self, request: Request, target: DeviceState, rule: Rule) -> None:
        assert request.device is not None
        self._actions.append(Migrate(request.id, request.device, target.number))
        self._to_plan[request.device] = None
        self.state.devices[request.device].leave(request)
        _move(request, Trigger.MIGRATE)
        request.device, request.rule = target.number, rule
        target.moving[request.id] = request
        self._has_changed = True  # the source has free memory

    def _prompt_cached(self, event: e.PromptCached, now_s: float) -> None:
        request = self.state.requests.get(event.request_id)
        if request is not None and not request.num_tokens:
            name, prompt_tokens = request.model.name, request.prompt_tokens
            self.state.cached.observe(name, prompt_tokens, event.num_tokens)

    def _attached(self, event: e.Attached, now_s: float) -> None:
        request = self.state.requests.get(event.request_id)
        if request is None or request.phase is not RequestPhase.MOVING or request.device is None:
            return
        device = self.state.devices[request.device]
        del device.moving[request.id]
        if event.num_tokens is not None:
            request.num_tokens = event.num_tokens
        _move(request, Trigger.ATTACH)
        device.join(request)
        self._to_plan[device.number] = None

    def _ended(self, event: e.Ended, now_s: float) -> None:
        request = self.state.requests.pop(event.request_id, None)
        if request is None:
            return
        self.state.held.pop(request.id, None)
        if request.device is not None:
            device = self.state.devices[request.device]
            _remove(request, device)
            self._to_plan[request.device] = None
        if event.is_complete and request.num_tokens:
            self._learn_length(request)
        self.policy.ended(request, self.state)
        self._has_changed = True

    def _memory_changed(self, event: e.MemoryChanged, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is not None:
            known = self.state.models
            device.missing_bytes.update(pair for pair in event.missing_bytes if pair[0] in known)

    def _turn_ended(self, event: e.TurnEnded, now_s: float) -> None:
        device = self.state.devices.get(event.device)
        if device is None or device.turn is None or device.turn.turn_id != event.turn_id:
            return
        device.turn = None
        self._to_plan[device.number] = None

    def _assign(self, now_s: float) -> None:
        for request, device, rule in self.policy.assign(self.state, now_s):
            if request.phase is RequestPhase.QUEUED and request.device is not None:
                self.state.devices[request.device].dequeue(request)
                self._to_plan[request.device] = None
            else:
                del self.state.held[request.id]
            _move(request, Trigger.PLACE)
            request.device, request.rule = device.number, rule
            device.enqueue(request, must_wait=not admits(device, request))
            self._to_plan[device.number] = None

    def _send(self, device: DeviceState, now_s: float) -> None:
        for request in self.policy.send(device, self.state, now_s):
            if device.is_waiting_for_kv(request):
                continue
            device.dequeue(request)
            _move(request, Trigger.SEND)
            device.join(request)
            self._actions.append(Send(request.id, device.number))

    def _plan(self, device: DeviceState, now_s: float) -> None:
        """Decide on the present and the next turn of a device; emit an action after a change."""
        admit(device, now_s)
        if device.queued:
            self._send(device, now_s)
        before = device.turn, device.then
        if device.turn is None:
            choice = self.policy.next_turn(device, self.state, now_s)
            if choice is not None:
                self.state.num_turns += 1
                device.turn = Turn(self.state.num_turns, *choice[:3])
                device.turn_rule = choice.rule
                device.turn_began_s = now_s
                if device.queued:
                    self._send(device, now_s)
        device.then = None
        if device.turn is not None:
            device.turn = self.policy.revise(device.turn, device, self.state, now_s)
            device.then = self.policy.upcoming(device, self.state, now_s)
        if (device.turn, device.then) != before:
            self._actions.append(StartTurn(device.number, device.turn, device.then))

    def _lose_device(self, request: Request, now_s: float) -> None:
        _move(request, Trigger.LOSE_DEVICE)
        request.device = None
        self._hold(request, now_s)

    def _hold(self, request: Request, now_s: float) -> None:
        """Hold a request to be prefilled, which counts as an arrival."""
        self.state.held[request.id] = request
        if not request.is_background:
            self.state.arrivals.add(
                request.model.name, now_s, request.prompt_tokens, request.expected_tokens
            )
        self.policy.arrived(request, self.state)
        self._has_arrivals = True

    def _take_off(self, device: DeviceState, model: Model) -> None:
        model.hosts.discard(device.number)
        del device.batches[model.name]
        device.missing_bytes.pop(model.name, None)
        if device.turn is not None and device.turn.model == model.name:
            device.turn = None
        self._to_plan[device.number] = None

    def _model(self, name: str) -> Model:
        try:
            return self.state.models[name]
        except KeyError:
            raise UnknownName(f"the core knows no model {name!r}") from None

    def _device(self, number: int) -> DeviceState:
        try:
            return self.state.devices[number]
        except KeyError:
            raise UnknownName(f"the core knows no device {number}") from None


def _move(request: Request, trigger: Trigger) -> None:
    name = f"request {request.id} of {request.model.name} with {request.num_tokens} tokens"
    where = f"{name} on device {request.device}"
    request.phase = phase_after(request.phase, trigger, where)


def _remove(request: Request, device: DeviceState) -> None:
    if request.phase is RequestPhase.QUEUED:
        device.dequeue(request)
    elif request.phase is RequestPhase.MOVING:
        del device.moving[request.id]
    else:
        device.leave(request)


def _learn_step(batch: Batch, event: e.Stepped) -> None:
    """Correct the model's predicted step time, for this kind of device, by a measured step.

    The measurement is compared with the prediction for the requests in the step: other requests of
    the batch wait for prefill or KV. For several steps, ``step_s`` is the time of the middle step.
    """
    assert event.step_s is not None
    ran = [batch.requests[key] for key in event.request_ids if key in batch.requests]
    if not ran:
        return
    context_tokens = sum(request.context_tokens for request in ran)
    context_tokens += len(ran) * max(event.num_tokens - 1, 0) // 2
    speed = batch.speed
    predicted_s = speed.costs.step_s(len(ran), context_tokens)
    if predicted_s > 0:
        speed.step_ratio += _STEP_SMOOTHING * (event.step_s / predicted_s - speed.step_ratio)
        batch.model.revision += 1


_HANDLERS: dict[type, Callable[[Core, Any, float], None]] = {
    e.ModelAdded: Core._model_added,
    e.TargetsChanged: Core._targets_changed,
    e.ModelRemoved: Core._model_removed,
    e.DeviceUp: Core._device_up,
    e.DeviceDown: Core._device_down,
    e.RoleSet: Core._role_set,
    e.DrainSet: Core._drain_set,
    e.BandwidthMeasured: Core._bandwidth_measured,
    e.FarSnapshots: Core._far_snapshots,
    e.QuotaMaxSet: Core._quota_max_set,
    e.Tick: Core._tick,
    e.Hosted: Core._hosted,
    e.Unhosted: Core._unhosted,
    e.Hostable: Core._hostable,
    e.Arrived: Core._arrived,
    e.Stepped: Core._stepped,
    e.PromptCached: Core._prompt_cached,
    e.Attached: Core._attached,
    e.Ended: Core._ended,
    e.MemoryChanged: Core._memory_changed,
    e.TurnEnded: Core._turn_ended,
}
