"""The shell around the scheduling core: messages become events, actions become messages."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from gpupoold.control.requests.rows import finish_reason
from gpupoold.domain import FinishReason, Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.actions import Action, ChangeRole, Migrate, Send, StartTurn
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.costs import ModelCosts
from gpupoold.scheduling.event_log import RecordedCore
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.base import Policy
from gpupoold.stats.buckets import WORK_BOUNDS_S, Buckets
from gpupoold.wire import messages as m

# What a measured bandwidth must differ by to be worth an event.
_BANDWIDTH_STEP = 0.05

SendTo = Callable[[int, m.AddRequest | m.RunTurn | m.EndTurn], None]
OnSent = Callable[[str, int], None]
OnMigrate = Callable[[str, int, int], None]
OnRole = Callable[[int, Role], None]


class Scheduler:
    """Passes events to the core and carries out its actions.

    ``send`` takes a worker's number and a message; ``on_sent`` a request's id and the number of its
    worker; ``on_migrate`` a request's id and the numbers of source and target; ``on_role`` a
    worker's new role. ``clock`` returns seconds of the monotonic clock. ``decisions`` has the
    durations of the core's calls in seconds.
    """

    def __init__(
        self,
        policy: Policy,
        send: SendTo,
        on_sent: OnSent,
        on_migrate: OnMigrate,
        on_role: OnRole,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = RecordedCore(Core(policy))
        self.decisions = Buckets(WORK_BOUNDS_S)
        self._send = send
        self._on_sent = on_sent
        self._on_migrate = on_migrate
        self._on_role = on_role
        self._clock = clock
        self._unsent: dict[str, m.AddRequest] = {}

    def add_model(
        self, targets: Targets, loaded: m.LoadedModel, costs: ModelCosts | None = None
    ) -> None:
        """Add a model, which can have requests once a worker hosts it; or change its
        description.
        """
        self._tell(
            e.ModelAdded(
                loaded.name,
                targets,
                loaded.weight_bytes,
                loaded.kv_bytes_per_token,
                costs or ModelCosts(),
            )
        )

    def check(self) -> None:
        """Raise ``CannotServe`` when the policy cannot serve all the models there are."""
        self.core.core.policy.check(self.core.core.state)

    def remove_model(self, name: str) -> None:
        """Remove a model, whose requests have ended before."""
        self._tell(e.ModelRemoved(name))

    def set_targets(self, name: str, targets: Targets) -> None:
        """New targets, for requests under way too."""
        self._tell(e.TargetsChanged(name, targets))

    def device_up(self, number: int, ready: m.WorkerReady, role: Role, *, is_fixed: bool) -> None:
        """A worker can serve, in this role."""
        self._tell(
            e.DeviceUp(
                number,
                ready.device_bytes,
                ready.bandwidth_bytes_per_s,
                kv_host_bytes=ready.kv_host_bytes,
                role=role,
                is_role_fixed=is_fixed,
                kind=ready.device_name,
            )
        )

    def set_role(self, number: int, role: Role, *, is_fixed: bool) -> None:
        """Set a worker's role."""
        self._tell(e.RoleSet(number, role, is_fixed))

    def set_draining(self, number: int, *, is_draining: bool) -> None:
        """A worker is to be emptied, or may have work again."""
        self._tell(e.DrainSet(number, is_draining))

    def set_bandwidth(self, number: int, bandwidth_bytes_per_s: float) -> None:
        """A worker's switches reach this by now; changes of a few per cent are ignored."""
        device = self.core.core.state.devices.get(number)
        if device is None or not bandwidth_bytes_per_s > 0:
            return
        before = device.bandwidth_bytes_per_s
        if abs(bandwidth_bytes_per_s - before) > _BANDWIDTH_STEP * before:
            self._tell(e.BandwidthMeasured(number, bandwidth_bytes_per_s))

    def set_quota_max(self, quota_max_s: float) -> None:
        """Set the longest turn, from the next planned turn on."""
        self._tell(e.QuotaMaxSet(quota_max_s))

    def num_requests(self, number: int) -> int:
        """Return the number of live requests on a worker or assigned to it."""
        device = self.core.core.state.devices.get(number)
        return 0 if device is None else device.num_requests

    def attached(self, request_id: str, num_tokens: int) -> None:
        """Let a migrated request continue, with ``num_tokens`` of its answer."""
        self._tell(e.Attached(request_id, num_tokens))

    def tick(self) -> None:
        """Time has passed: of interest while there are requests. To be called every second."""
        if self.core.core.state.requests:
            self._tell(e.Tick())

    def device_down(self, number: int, request_ids: Iterable[str] = ()) -> None:
        """Remove a worker and end its requests there.

        Both in one call: between two calls the core would send further requests to the worker.
        """
        ended = [e.Ended(request_id, is_complete=False) for request_id in request_ids]
        self._tell(*ended, e.DeviceDown(number))

    def host(self, number: int, name: str, costs: ModelCosts | None = None) -> None:
        """Add a model to a worker at these costs; None means the costs of its description."""
        self._tell(e.Hosted(number, name, costs))

    def unhost(self, number: int, name: str) -> None:
        """A worker can run a model no more."""
        self._tell(e.Unhosted(number, name))

    def arrived(self, message: m.AddRequest) -> None:
        """Schedule a request; the policy decides when its worker gets the request."""
        self._unsent[message.request_id] = message
        self._tell(
            e.Arrived(
                message.request_id,
                message.model,
                message.arrival_s,
                message.num_prompt_tokens,
                priority=message.priority,
                num_tokens=len(message.output_token_ids),
                max_tokens=message.max_tokens or None,
            )
        )

    def ended(self, request_id: str) -> None:
        """End a request without a complete answer: cancelled or failed."""
        self._unsent.pop(request_id, None)
        self._tell(e.Ended(request_id, is_complete=False))

    def stepped(self, number: int, outputs: m.StepOutputs) -> None:
        """Record the tokens of a worker's step, and requests that ended with the step."""
        ended = [one for one in outputs.progress if one.finish_reason is not None]
        for one in ended:
            self._unsent.pop(one.request_id, None)
        self._tell(*_steps(number, outputs), *(_ended(one) for one in ended))

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        changed = _memory_changed(number, message)
        self._tell(changed, e.TurnEnded(number, message.turn_id))

    def memory_changed(self, number: int, message: m.MemoryReport) -> None:
        """Update the bytes missing to run models."""
        self._tell(_memory_changed(number, message))

    def num_waiting_for_kv(self, number: int) -> int:
        """Return the number of requests held back because a worker's KV memory is full."""
        device = self.core.core.state.devices.get(number)
        return 0 if device is None else device.num_waiting_for_kv

    def on_turn(self, number: int) -> str | None:
        """Return the model whose turn it is on a worker."""
        device = self.core.core.state.devices.get(number)
        return device.turn.model if device is not None and device.turn is not None else None

    def check_state(self) -> None:
        """Raise AssertionError when the core's books disagree."""
        check_state(self.core.core.state)

    def _tell(self, *events: e.Event) -> None:
        started_s = time.perf_counter()
        actions = self.core.handle(events, self._clock())
        self.decisions.add(time.perf_counter() - started_s)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                message = self._unsent.pop(action.request_id)
                self._on_sent(action.request_id, action.device)
                self._send(action.device, message)
            case StartTurn():
                self._send(action.device, _order(action))
            case Migrate():
                self._on_migrate(action.request_id, action.source, action.target)
            case ChangeRole():
                self._on_role(action.device, action.role)


def _steps(number: int, outputs: m.StepOutputs) -> list[e.Event]:
    """Return a step's tokens as events, one per number of tokens; one event has the step's time."""
    by_count: dict[int, list[str]] = defaultdict(list)
    for item in outputs.progress:
        if item.new_token_ids:
            by_count[len(item.new_token_ids)].append(item.request_id)
    model, step_s = outputs.model, outputs.step_s
    if len(by_count) <= 1:
        return [e.Stepped(number, model, tuple(ids), n, step_s) for n, ids in by_count.items()]
    # The time first: it is compared with what was predicted before these tokens were counted.
    ran = tuple(request_id for ids in by_count.values() for request_id in ids)
    steps: list[e.Event] = [] if step_s is None else [e.Stepped(number, model, ran, 0, step_s)]
    return steps + [e.Stepped(number, model, tuple(ids), n) for n, ids in by_count.items()]


def _ended(item: m.RequestProgress) -> e.Ended:
    """Return the end of a request reported by a step; the engine may have aborted the request."""
    assert item.finish_reason is not None
    reason = finish_reason(item.finish_reason)
    is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
    return e.Ended(item.request_id, is_complete)


def _memory_changed(number: int, message: m.TurnReport | m.MemoryReport) -> e.MemoryChanged:
    return e.MemoryChanged(number, tuple(sorted(message.missing_bytes.items())))


def _order(action: StartTurn) -> m.RunTurn | m.EndTurn:
    turn = action.turn
    if turn is None:
        return m.EndTurn()
    return m.RunTurn(turn.turn_id, turn.model, turn.quota_s, action.then, turn.chunk_tokens)
