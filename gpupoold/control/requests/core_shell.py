"""The shell around the scheduling core: messages become events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.requests.rows import finish_reason
from gpupoold.domain import FinishReason, Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.actions import Action
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.costs import POOLING_COSTS, ModelCosts
from gpupoold.scheduling.event_log import RecordedCore
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.state import State
from gpupoold.stats.histogram import WORK_BOUNDS_S, Histogram
from gpupoold.wire import messages as m

# Smallest relative change of a measured bandwidth for an event.
_BANDWIDTH_STEP = 0.05


class Scheduler:
    """Passes events to the core and the core's actions to ``carry_out``.

    ``clock`` returns seconds of the monotonic clock. ``decisions`` has the durations of the core's
    calls in seconds.
    """

    def __init__(
        self,
        policy: Policy,
        carry_out: Callable[[Action], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = RecordedCore(Core(policy))
        self.decisions = Histogram(WORK_BOUNDS_S)
        self._carry_out = carry_out
        self._clock = clock

    @property
    def state(self) -> State:
        """The core's state, for reading."""
        return self.core.state

    def add_model(
        self, targets: Targets, loaded: m.LoadedModel, costs: ModelCosts | None = None
    ) -> None:
        """Add a model, or change the description; requests need a worker that hosts the model."""
        self._handle(
            e.ModelAdded(
                loaded.name,
                targets,
                loaded.weight_bytes + loaded.slot_bytes,
                loaded.kv_bytes_per_token,
                costs or (ModelCosts() if loaded.generates else POOLING_COSTS),
                loaded.generates,
            )
        )

    def check(self) -> None:
        """Raise ``CannotServe`` when the policy cannot serve all present models."""
        self.core.policy.check(self.state)

    def remove_model(self, name: str) -> None:
        """Remove a model without live requests."""
        self._handle(e.ModelRemoved(name))

    def set_targets(self, name: str, targets: Targets) -> None:
        """Change the targets, also for requests under way."""
        self._handle(e.TargetsChanged(name, targets))

    def device_up(self, number: int, ready: m.WorkerReady, role: Role, *, is_fixed: bool) -> None:
        """Add a worker in this role."""
        self._handle(
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
        self._handle(e.RoleSet(number, role, is_fixed))

    def set_draining(self, number: int, *, is_draining: bool) -> None:
        """Drain a worker, or end the drain."""
        self._handle(e.DrainSet(number, is_draining))

    def set_bandwidth(self, number: int, bandwidth_bytes_per_s: float) -> None:
        """Set the measured bandwidth of a worker; a change of a few per cent is ignored."""
        device = self.state.devices.get(number)
        if device is None or not bandwidth_bytes_per_s > 0:
            return
        before = device.bandwidth_bytes_per_s
        if abs(bandwidth_bytes_per_s - before) > _BANDWIDTH_STEP * before:
            self._handle(e.BandwidthMeasured(number, bandwidth_bytes_per_s))

    def set_quota_max(self, quota_max_s: float) -> None:
        """Set the longest turn, from the next planned turn on."""
        self._handle(e.QuotaMaxSet(quota_max_s))

    def num_requests(self, number: int) -> int:
        """Return the number of live requests on or assigned to a worker."""
        device = self.state.devices.get(number)
        return 0 if device is None else device.num_requests

    def attached(self, request_id: str, num_tokens: int) -> None:
        """Continue a migrated request after ``num_tokens`` of the answer."""
        self._handle(e.Attached(request_id, num_tokens))

    def tick(self) -> None:
        """Pass the time to the core if there are requests; to be called every second."""
        if self.state.requests:
            self._handle(e.Tick())

    def device_down(self, number: int, request_ids: Iterable[str] = ()) -> None:
        """Remove a worker, and end the requests there.

        One call does both: between two calls the core would send further requests to the worker.
        """
        ended = [e.Ended(request_id, is_complete=False) for request_id in request_ids]
        self._handle(*ended, e.DeviceDown(number))

    def host(self, number: int, name: str, costs: ModelCosts | None = None) -> None:
        """Add a model to a worker at these costs; None means the costs of the description."""
        self._handle(e.Hosted(number, name, costs))

    def unhost(self, number: int, name: str) -> None:
        """Remove a model from a worker."""
        self._handle(e.Unhosted(number, name))

    def hostable(self, change: e.Hostable) -> None:
        """Set the workers that load or could load a model."""
        self._handle(change)

    def arrived(self, request: LiveRequest) -> None:
        """Schedule a request; the policy decides the time of the action ``Send``."""
        order = request.order
        has_own = order.served_name or request.is_background
        own_ttft_s = request.targets.ttft_s if has_own else None
        self._handle(
            e.Arrived(
                order.request_id,
                order.model,
                order.arrival_s,
                order.num_prompt_tokens,
                priority=order.priority,
                num_tokens=len(request.output_token_ids),
                max_tokens=order.max_tokens or None,
                ttft_s=own_ttft_s,
            )
        )

    def ended(self, request_ids: Iterable[str]) -> None:
        """End requests without a complete answer: cancelled or failed.

        One call ends all: between two calls the core would send other requests of the list.
        """
        ended = [e.Ended(request_id, is_complete=False) for request_id in request_ids]
        if ended:
            self._handle(*ended)

    def stepped(self, number: int, outputs: m.StepOutputs) -> None:
        """Record the tokens of a worker's step, and the ends of requests in the step."""
        ended = [_ended(one) for one in outputs.progress if one.finish_reason is not None]
        self._handle(*_steps(number, outputs), *ended)

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        changed = _memory_changed(number, message)
        self._handle(changed, e.TurnEnded(number, message.turn_id))

    def memory_changed(self, number: int, message: m.MemoryReport) -> None:
        """Update the bytes missing to run models."""
        self._handle(_memory_changed(number, message))

    def num_waiting_for_kv(self, number: int) -> int:
        """Return the number of requests held back for lack of KV memory on a worker."""
        device = self.state.devices.get(number)
        return 0 if device is None else device.num_waiting_for_kv

    def on_turn(self, number: int) -> str | None:
        """Return the model of the present turn on a worker."""
        device = self.state.devices.get(number)
        return device.turn.model if device is not None and device.turn is not None else None

    def check_state(self) -> None:
        """Raise AssertionError if the core's state is inconsistent."""
        check_state(self.state)

    def _handle(self, *events: e.Event) -> None:
        started_s = time.perf_counter()
        actions = self.core.handle(events, self._clock())
        self.decisions.add(time.perf_counter() - started_s)
        for action in actions:
            self._carry_out(action)


def _steps(number: int, outputs: m.StepOutputs) -> list[e.Event]:
    """Return a step's tokens as events, one per number of tokens; one event has the step's time."""
    by_count: dict[int, list[str]] = defaultdict(list)
    for item in outputs.progress:
        if item.num_tokens:
            by_count[item.num_tokens].append(item.request_id)
    model, step_s = outputs.model, outputs.step_s
    cached: list[e.Event] = [
        e.PromptCached(item.request_id, item.num_cached_tokens)
        for item in outputs.progress
        if item.num_cached_tokens is not None
    ]
    if len(by_count) <= 1:
        only = [e.Stepped(number, model, tuple(ids), n, step_s) for n, ids in by_count.items()]
        return [*cached, *only]
    # The time first, for comparison with the prediction before these tokens are counted.
    ran = tuple(request_id for ids in by_count.values() for request_id in ids)
    steps: list[e.Event] = [] if step_s is None else [e.Stepped(number, model, ran, 0, step_s)]
    tokens = [e.Stepped(number, model, tuple(ids), n) for n, ids in by_count.items()]
    return [*cached, *steps, *tokens]


def _ended(item: m.RequestProgress) -> e.Ended:
    """Return the end of a request reported by a step; the engine may have aborted the request."""
    assert item.finish_reason is not None
    reason = finish_reason(item.finish_reason)
    is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
    return e.Ended(item.request_id, is_complete)


def _memory_changed(number: int, message: m.TurnReport | m.MemoryReport) -> e.MemoryChanged:
    return e.MemoryChanged(number, tuple(sorted(message.missing_bytes.items())))
