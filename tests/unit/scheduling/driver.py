"""A core with models and devices, driven by short calls."""

from __future__ import annotations

from collections.abc import Iterable

from gpupoold.domain import Priority, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action, Migrate, ModelCosts, Send, StartTurn
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.base import Choice, Placement, Policy
from gpupoold.scheduling.state import DeviceState, State

GB = 10**9
STEP_S = 0.025
COSTS = ModelCosts(prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=STEP_S)


class FirstDevicePolicy(Policy):
    """As simple as can be: the first host, all at once, the first batch with work."""

    name = "first-device"

    def assign(self, state: State, now_s: float) -> Iterable[Placement]:
        for request in list(state.held.values()):
            devices = state.prefill_hosts(request.model)
            if devices:
                yield Placement(request, devices[0])

    def next_turn(self, device: DeviceState, state: State, now_s: float) -> Choice | None:
        name = next(iter(device.working), None)
        return None if name is None else Choice(name, 1.0)

    def upcoming(self, device: DeviceState, state: State, now_s: float) -> str | None:
        current = device.turn.model if device.turn else None
        return next((name for name in device.working if name != current), None)


class Driver:
    """Sends events to a core, checks the state after each call, and keeps the clock."""

    def __init__(
        self,
        policy: Policy | None = None,
        models: str = "a b c",
        num_devices: int = 1,
        *,
        targets: Targets | None = None,
        costs: ModelCosts = COSTS,
        weight_bytes: int = 10 * GB,
        kv_bytes_per_token: int = 100_000,
        capacity_bytes: int = 80 * GB,
        bandwidth_bytes_per_s: float = 10 * GB,
        kv_host_bytes: int | None = None,
    ) -> None:
        self.core = Core(policy or FirstDevicePolicy())
        self.state = self.core.state
        self.now_s = 0.0
        self.num_requests = 0
        targets = targets or Targets(10.0, 0.1)
        for name in models.split():
            self.send(e.ModelAdded(name, targets, weight_bytes, kv_bytes_per_token, costs))
        for number in range(num_devices):
            self.send(
                e.DeviceUp(
                    number, capacity_bytes, bandwidth_bytes_per_s, kv_host_bytes=kv_host_bytes
                )
            )
            self.send(*(e.Hosted(number, name) for name in models.split()))

    def send(self, *events: e.Event, at_s: float | None = None) -> list[Action]:
        if at_s is not None:
            self.now_s = at_s
        actions = self.core.handle(events, self.now_s)
        check_state(self.state)
        return actions

    def arrive(
        self,
        model: str,
        request_id: str = "",
        *,
        at_s: float | None = None,
        prompt_tokens: int = 100,
        output_tokens: int | None = None,
        priority: Priority = Priority.NORMAL,
        ttft_s: float | None = None,
    ) -> list[Action]:
        if at_s is not None:
            self.now_s = at_s
        self.num_requests += 1
        name = request_id or f"r{self.num_requests}"
        arrived = e.Arrived(
            name, model, self.now_s, prompt_tokens, output_tokens, priority, ttft_s=ttft_s
        )
        return self.send(arrived)

    def step(
        self, device: int, *request_ids: str, num_tokens: int = 1, step_s: float | None = None
    ) -> list[Action]:
        """Tokens for requests of one model, which is that of the first."""
        model = self.state.requests[request_ids[0]].model.name
        return self.send(e.Stepped(device, model, request_ids, num_tokens, step_s))

    def end_turn(self, device: int = 0, *, at_s: float | None = None) -> list[Action]:
        turn = self.state.devices[device].turn
        assert turn is not None
        return self.send(e.TurnEnded(device, turn.turn_id), at_s=at_s)

    def running(self, device: int = 0) -> str | None:
        turn = self.state.devices[device].turn
        return turn.model if turn else None

    def quota_s(self, device: int = 0) -> float:
        turn = self.state.devices[device].turn
        assert turn is not None
        return turn.quota_s

    def turns(self, count: int, device: int = 0, *, each_s: float = 0.0) -> list[str | None]:
        """The models of the present turn and those after it."""
        models = [self.running(device)]
        for _ in range(count - 1):
            self.end_turn(device, at_s=self.now_s + each_s)
            models.append(self.running(device))
        return models

    def place(self, request_id: str) -> tuple[str, int | None]:
        request = self.state.requests[request_id]
        return request.phase.name, request.device


def sends(actions: Iterable[Action]) -> list[tuple[str, int]]:
    return [(one.request_id, one.device) for one in actions if isinstance(one, Send)]


def migrations_in(actions: Iterable[Action]) -> list[tuple[str, int, int]]:
    return [(a.request_id, a.source, a.target) for a in actions if isinstance(a, Migrate)]


def runs(actions: Iterable[Action]) -> list[tuple[int, str | None, str | None]]:
    """Device, model on turn, model after it."""
    return [
        (one.device, one.turn.model if one.turn else None, one.then)
        for one in actions
        if isinstance(one, StartTurn)
    ]
