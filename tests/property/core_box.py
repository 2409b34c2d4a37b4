"""A box of devices that obeys the scheduling core, for tests: messages from it are late.

What the core is told and what it wants is checked at every step against what the box knows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from gpupoold.domain import Priority, Role, Targets
from gpupoold.replay.log_file import RecordedCore
from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import HOST_SHARE
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import (
    Action,
    ChangeRole,
    Migrate,
    ModelCosts,
    Send,
    StartTurn,
    Turn,
)
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.state import DeviceState
from gpupoold.sim.policies import PolicyOptions, make_policy

GB = 10**9
COSTS = ModelCosts(prefill_base_s=0.01, decode_base_s=0.02, decode_sequence_s=0.001)


@dataclass(frozen=True)
class Sizes:
    """Of every model and device of a box."""

    weight_bytes: int = 20 * GB
    kv_bytes_per_token: int = 100_000
    capacity_bytes: int = 400 * GB
    kv_host_bytes: int | None = None


@dataclass(eq=False)
class Live:
    """A request on a device."""

    id: str
    model: str
    num_left: int
    has_token: bool = False


@dataclass(eq=False)
class BoxDevice:
    """One device: what it has, what it does, and what it has said that nobody has heard yet."""

    number: int
    is_up: bool = False
    hosted: set[str] = field(default_factory=set)
    has: dict[str, Live] = field(default_factory=dict)
    turn: Turn | None = None
    then: str | None = None
    last_ended: int = 0
    said: deque[e.Event] = field(default_factory=deque)

    def reset(self) -> None:
        """Forget everything but what the daemon may hear of a device that is gone."""
        self.has.clear()
        self.hosted.clear()
        self.turn = self.then = None
        self.said = deque(one for one in self.said if isinstance(one, e.Stepped | e.TurnEnded))


class Box:
    """Devices, a core, and the truth about requests."""

    def __init__(
        self, policy: str, num_devices: int, num_prefill: int = 1, sizes: Sizes | None = None
    ) -> None:
        self.policy = policy
        self.sizes = sizes or Sizes()
        self.num_prefill = num_prefill
        self.options = PolicyOptions(num_prefill)
        self.recorded = RecordedCore(Core(make_policy(policy, self.options)), 1_000_000)
        self.state = self.recorded.state
        self.now_s = 0.0
        self.devices = [BoxDevice(number) for number in range(num_devices)]
        self.models: set[str] = set()
        self.lives: dict[str, tuple[str, int]] = {}  # live requests: model, tokens they want
        self.num_requests = 0
        self.num_sends = 0

    # What happens to the box.

    def add_model(self, model: str, targets: Targets) -> None:
        self.models.add(model)
        sizes = self.sizes
        self.tell(e.ModelAdded(model, targets, sizes.weight_bytes, sizes.kv_bytes_per_token, COSTS))

    def remove_model(self, model: str) -> None:
        self.models.discard(model)
        for device in self.devices:
            self._drop(device, model)
        self.tell(e.ModelRemoved(model))

    def up(self, number: int) -> None:
        device = self.devices[number]
        device.reset()
        device.said.clear()
        device.is_up = True
        sizes = self.sizes
        self.tell(
            e.DeviceUp(number, sizes.capacity_bytes, 20 * GB, kv_host_bytes=sizes.kv_host_bytes)
        )

    def down(self, number: int) -> None:
        self._release_requests_on_their_way_to(number)
        self.devices[number].reset()
        self.devices[number].is_up = False
        self.tell(e.DeviceDown(number))

    def host(self, number: int, model: str) -> None:
        if self.devices[number].is_up and model in self.models:
            self.devices[number].hosted.add(model)
            self.tell(e.Hosted(number, model))

    def unhost(self, number: int, model: str) -> None:
        self._drop(self.devices[number], model)
        self.tell(e.Unhosted(number, model))

    def arrive(
        self,
        model: str,
        prompt_tokens: int,
        num_tokens: int,
        ago_s: float,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        self.lives[request_id] = model, num_tokens
        arrival_s = self.now_s - ago_s
        self.tell(e.Arrived(request_id, model, arrival_s, prompt_tokens, num_tokens, priority))

    def cancel(self, request_id: str) -> None:
        for device in self.devices:
            device.has.pop(request_id, None)
        self.tell(e.Ended(request_id))

    def step(self, device: BoxDevice, num_steps: int, step_s: float) -> None:
        """One prefill or some decode steps of the turn; without either, its end."""
        if device.turn is None:
            return
        model = device.turn.model
        mine = [one for one in device.has.values() if one.model == model]
        waiting = [one for one in mine if not one.has_token]
        batch = waiting[:1] or mine
        if not batch:
            self.end_turn(device)
            return
        num_tokens = 1 if waiting else min(num_steps, *(one.num_left for one in mine))
        self.now_s += step_s * num_tokens
        for one in batch:
            one.has_token = True
            one.num_left -= num_tokens
        ids = tuple(one.id for one in batch)
        device.said.append(
            e.Stepped(device.number, model, ids, num_tokens, None if waiting else step_s)
        )
        for one in batch:
            if not one.num_left:
                del device.has[one.id]
                device.said.append(e.Ended(one.id))

    def end_turn(self, device: BoxDevice) -> None:
        if device.turn is not None:
            device.said.append(e.TurnEnded(device.number, device.turn.turn_id))
            device.last_ended, device.turn = device.turn.turn_id, None

    def hear(self, device: BoxDevice, num_events: int) -> None:
        """Let the core know the next things that a device has said."""
        count = min(num_events, len(device.said))
        self.tell(*(device.said.popleft() for _ in range(count)))

    def hear_all(self) -> None:
        """Until nobody has anything more to say."""
        while any(device.said for device in self.devices):
            for device in self.devices:
                self.hear(device, len(device.said))

    def finish(self, max_rounds: int = 3000) -> None:
        """Everything comes up, and all that is live is served to its end.

        Roles and drains stay as they are; time passes by ticks as well as by steps.
        """
        self.hear_all()
        for device in self.devices:
            if not device.is_up:
                self.up(device.number)
            for model in sorted(self.models):
                self.host(device.number, model)
        for number in range(max_rounds):
            self.hear_all()
            if number % 5 == 0:
                self.tell(e.Tick())
            if not self.state.requests:
                break
            for device in self.devices:
                self.step(device, 10, 0.02)
                if device.then is not None:
                    self.end_turn(device)
        assert not self.state.requests, f"{self.state.requests} are never served"
        for device in self.devices:
            self.step(device, 1, 0.0)  # finds nothing to do
        self.hear_all()
        for known in self.state.devices.values():
            assert (known.turn, known.then) == (None, None)

    def set_role(self, number: int, role: Role, *, is_fixed: bool) -> None:
        self.tell(e.RoleSet(number, role, is_fixed))

    def _release_requests_on_their_way_to(self, number: int) -> None:
        """Hear of the ends of these requests, as the daemon does before it sends them elsewhere."""
        known = self.state.devices.get(number)
        moving = {one.id for one in known.moving.values()} if known is not None else set()
        for device in self.devices:
            ended = {one.request_id for one in device.said if isinstance(one, e.Ended)}
            if ended & moving:
                self.hear(device, len(device.said))

    # What the core is told, wants, and knows.

    def tell(self, *events: e.Event) -> None:
        for event in events:
            if isinstance(event, e.Ended):
                self.lives.pop(event.request_id, None)
            elif isinstance(event, e.ModelRemoved):
                self.lives = {k: v for k, v in self.lives.items() if v[0] != event.model}
        actions = self.recorded.handle(events, self.now_s)
        check_state(self.state)
        for action in actions:
            self._obey(action)
        self._compare()

    def _obey(self, action: Action) -> None:
        match action:
            case Send():
                device = self.devices[action.device]
                model, num_tokens = self.lives[action.request_id]
                assert device.is_up
                assert model in device.hosted
                assert not any(action.request_id in one.has for one in self.devices)
                num_left = num_tokens - self.state.requests[action.request_id].num_tokens
                # What was said of its last token may be lost with a device: it is made again.
                live = Live(action.request_id, model, max(num_left, 1))
                device.has[live.id] = live
                self.num_sends += 1
                self._check_kv(device)
            case Migrate():
                source, target = self.devices[action.source], self.devices[action.target]
                model, _ = self.lives[action.request_id]
                assert source is not target
                assert target.is_up
                assert model in target.hosted
                moved = source.has.pop(action.request_id, None)
                if moved is not None:  # else its end has been said, but not been heard
                    target.has[moved.id] = moved
                    self._check_kv(target)
                    target.said.append(e.Attached(moved.id))
            case StartTurn():
                self._run(self.devices[action.device], action)
            case ChangeRole():
                known = self.state.devices[action.device]
                assert known.role is action.role
                assert not known.is_role_fixed

    def _run(self, device: BoxDevice, order: StartTurn) -> None:
        assert device.is_up
        device.then = order.then
        if order.turn is None:
            device.turn = None
        elif order.turn.turn_id > device.last_ended:
            assert order.turn.model in device.hosted
            if device.turn is None or device.turn.turn_id != order.turn.turn_id:
                working = self.state.devices[device.number].working
                assert order.turn.model in working, f"{order} finds nothing to do"
            device.turn = order.turn

    def _check_kv(self, device: BoxDevice) -> None:
        """What a device has when it gets a request fits device and host, or is that one only."""
        sizes = self.sizes
        if sizes.kv_host_bytes is None or len(device.has) == 1:
            return
        tokens = sum(self.state.requests[request_id].context_tokens for request_id in device.has)
        room_bytes = sizes.capacity_bytes - sizes.weight_bytes + sizes.kv_host_bytes
        assert tokens * sizes.kv_bytes_per_token <= room_bytes

    def _compare(self) -> None:
        """The core knows who is live, and no device with work is idle."""
        assert set(self.state.requests) == set(self.lives)
        for number, device in self.state.devices.items():
            requests = [one for batch in device.batches.values() for one in batch.requests]
            has_work = bool(requests or device.queued) or self._could_begin(device)
            assert device.turn is not None or not has_work, f"device {number} idles with work"
            twin = self.devices[number]
            if not twin.said:
                assert set(requests) == set(twin.has) - set(device.moving)
                assert twin.turn == device.turn or not has_work
                assert twin.then == device.then or not has_work
        self._nobody_waits_for_an_idle_device()

    def _could_begin(self, device: DeviceState) -> bool:
        """Return whether those that wait for KV room have it, whoever of them is first.

        They have none while requests that are on their way to the device, and are served when
        they have come, keep it: all of it, or all that fits beside the weights of their model.
        """
        waiting = [
            one for queue in device.waiting_for_kv.values() for one in queue.requests.values()
        ]
        if not waiting or not device.moving:
            return bool(waiting)
        sizes = self.sizes
        assert sizes.kv_host_bytes is not None
        room_bytes = sizes.capacity_bytes - sizes.weight_bytes + HOST_SHARE * sizes.kv_host_bytes
        own_room_bytes = sizes.capacity_bytes - sizes.weight_bytes
        kept_bytes, of_model = 0.0, defaultdict[str, float](float)
        for one in device.moving.values():
            kept_bytes += one.kv_need_bytes
            of_model[one.model.name] += one.kv_need_bytes
        return all(
            kept_bytes + one.kv_need_bytes <= room_bytes
            and (
                not of_model[one.model.name]
                or of_model[one.model.name] + one.kv_need_bytes <= own_room_bytes
            )
            for one in waiting
        )

    def _nobody_waits_for_an_idle_device(self) -> None:
        for request in self.state.held.values():
            for device in self.state.prefill_hosts(request.model):
                has_any = any(b.requests for b in device.batches.values())
                is_idle = not (device.queued or device.moving or has_any)
                if is_idle and self.policy != "static":
                    raise AssertionError(f"{request} is held, device {device.number} is idle")

    def _drop(self, device: BoxDevice, model: str) -> None:
        """A model is unloaded; what its engine said last is not listened to any more."""
        device.hosted.discard(model)
        gone = {one.id for one in device.has.values() if one.model == model}
        gone |= {request_id for request_id, (name, _) in self.lives.items() if name == model}
        for request_id in gone:
            device.has.pop(request_id, None)
        device.said = deque(
            one
            for one in device.said
            if not (
                (isinstance(one, e.Ended | e.Attached) and one.request_id in gone)
                or (isinstance(one, e.Stepped) and one.model == model)
            )
        )
        if device.turn is not None and device.turn.model == model:
            self.end_turn(device)
