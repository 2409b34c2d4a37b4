"""The shell around the scheduling core: events in, orders out, and suspects of crashes."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpupool_state import History
from gpupoold.control.live_requests import LiveRequest, LiveRequests, Suspect
from gpupoold.control.processes.supervised import Candidates
from gpupoold.control.requests.accounts import finish_reason
from gpupoold.control.requests.migrations import KvPeers, Migrations
from gpupoold.control.workers.worker import Roles, Worker
from gpupoold.domain import FinishReason, Role, Targets
from gpupoold.replay.log_file import RecordedCore
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import (
    POOLING_COSTS,
    Action,
    ChangeRole,
    Migrate,
    ModelCosts,
    Send,
    StartTurn,
)
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.state import State
from gpupoold.stats.histogram import WORK_BOUNDS_S, Histogram
from gpupoold.wire import messages as m

# Smallest relative change of a measured bandwidth for an event.
_BANDWIDTH_STEP = 0.05

PASSED_TOKENS = 4
"""Tokens after the crash that clear a suspect: more than the steps under way at once."""
_MAX_UNCLEAR_TRIALS = 3
_MAX_CASES = 31
# After this time without an outcome the next trial begins beside the present trial.
_TRIAL_S = 10.0

_logger = logging.getLogger(__name__)


class CoreShell:
    """Passes events to the core and the core's actions to ``carry_out``.

    ``clock`` returns seconds of the monotonic clock. ``decisions`` has the durations of the core's
    calls in seconds, ``core`` records the calls.
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

    def handle(self, *events: e.Event) -> None:
        """Handle events that belong together: between two calls the core makes decisions."""
        if not events:
            return
        started_s = time.perf_counter()
        actions = self.core.handle(events, self._clock())
        self.decisions.add(time.perf_counter() - started_s)
        for action in actions:
            self._carry_out(action)


def model_added(
    targets: Targets, loaded: m.LoadedModel, costs: ModelCosts | None = None
) -> e.ModelAdded:
    """Return the event of a new model, or of a changed description."""
    return e.ModelAdded(
        loaded.name,
        targets,
        loaded.weight_bytes + loaded.slot_bytes,
        loaded.kv_bytes_per_token,
        costs or (ModelCosts() if loaded.generates else POOLING_COSTS),
        loaded.generates,
    )


def device_up(number: int, ready: m.WorkerReady, role: Role, *, is_fixed: bool) -> e.DeviceUp:
    return e.DeviceUp(
        number,
        ready.facts.device_bytes,
        ready.facts.bandwidth_bytes_per_s,
        kv_host_bytes=ready.facts.kv_host_limit_bytes,
        role=role,
        is_role_fixed=is_fixed,
        kind=ready.device_name,
        far_share=ready.facts.far_share,
    )


def bandwidth_measured(
    state: State, number: int, bandwidth_bytes_per_s: float
) -> list[e.BandwidthMeasured]:
    """Return the event of a worker's bandwidth, none after a change of a few per cent."""
    device = state.devices.get(number)
    if device is None or not bandwidth_bytes_per_s > 0:
        return []
    before = device.bandwidth_bytes_per_s
    if abs(bandwidth_bytes_per_s - before) <= _BANDWIDTH_STEP * before:
        return []
    return [e.BandwidthMeasured(number, bandwidth_bytes_per_s)]


def arrived(request: LiveRequest) -> e.Arrived:
    """Return the event of a request to schedule; the policy decides the time of ``Send``."""
    order = request.order
    has_own = order.served_name or request.is_background
    return e.Arrived(
        order.request_id,
        order.model,
        order.arrival_s,
        order.num_prompt_tokens,
        priority=order.priority,
        num_tokens=len(request.output_token_ids),
        max_tokens=order.max_tokens or None,
        ttft_s=request.targets.ttft_s if has_own else None,
    )


def cut_short(requests: Iterable[LiveRequest]) -> list[e.Ended]:
    """Return the ends of requests without a complete answer: cancelled, failed or lost."""
    return [e.Ended(request.request_id, is_complete=False) for request in requests]


def stepped(number: int, outputs: m.StepOutputs) -> list[e.Event]:
    """Return the tokens of a worker's step, and the ends of requests in the step."""
    ended = [_ended(item) for item in outputs.progress if item.finish_reason is not None]
    return [*_steps(number, outputs), *ended]


def memory_changed(number: int, message: m.TurnReport | m.MemoryReport) -> e.MemoryChanged:
    """Return the event of the bytes missing to run models."""
    return e.MemoryChanged(number, tuple(sorted(message.missing_bytes.items())))


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


class WorkerOrders:
    """Sends orders to workers by number, and records the worker of each request."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        live: LiveRequests,
        roles: Roles,
        migrations: Migrations,
        kv_peers: KvPeers,
        history: History,
    ) -> None:
        self._workers = workers
        self._live = live
        self._roles = roles
        self._migrations = migrations
        self._kv_peers = kv_peers
        self._history = history

    def carry_out(self, action: Action) -> None:
        """Carry out an action of the scheduling core."""
        match action:
            case Send():
                request = self._live[action.request_id]
                request.device = action.device
                self._workers[action.device].send(request.order_now())
            case StartTurn():
                self._workers[action.device].send(run_turn(action))
            case Migrate():
                request = self._live[action.request_id]
                self._migrations.begin(request, action.source, action.target)
            case ChangeRole():
                self._roles.chosen(action.device, action.role)
                self.introduce_peers()
                device = str(action.device)
                self._history.record_event("info", "role_changed", device, action.role.value)

    def abort(self, requests: Iterable[LiveRequest]) -> None:
        """Stop requests on the workers; the records stay."""
        for request in requests:
            if request.device is not None:
                message = m.AbortRequests(request.model, [request.request_id])
                self._workers[request.device].send(message)

    def end_isolation(self, request: LiveRequest) -> None:
        """Allow a request to share steps again, if a worker has the request."""
        if request.device is not None and not request.is_isolated:
            message = m.EndIsolation(request.model, request.request_id)
            self._workers[request.device].send(message)

    def introduce_peers(self) -> None:
        """Introduce prefilling workers to decoding workers, before the first migration."""
        with_role: dict[Role, list[int]] = {role: [] for role in Role}
        for number in self._workers:
            with_role[self._roles.of(number)[0]].append(number)
        self._kv_peers.introduce(with_role[Role.PREFILL], with_role[Role.DECODE])


def run_turn(action: StartTurn) -> m.RunTurn | m.EndTurn:
    """Return the message that starts or changes a worker's turn, or ends the turn."""
    turn = action.turn
    if turn is None:
        return m.EndTurn()
    return m.RunTurn(turn.turn_id, turn.model, turn.quota_s, action.then, turn.chunk_tokens)


@dataclass(slots=True)
class _CrashCase:
    """A crash due to ``model`` or to one of ``requests``; cleared requests are removed."""

    model: str
    requests: set[str]


class Suspects:
    """All suspects of a daemon; times are seconds of one monotonic clock.

    The record of each request has the state as a suspect.

    A crash makes *suspects* of all candidate requests. A suspect is held back until a trial without
    other requests in the steps. A suspect beyond the point of the crash is cleared. A trial that
    crashes the worker, with no other candidate, convicts the suspect, which ends with an error. A
    request under suspicion a second time runs alone to the end: no combination of requests can
    crash workers without end. This class is pure; ``Isolation`` holds and retries requests.
    """

    def __init__(self) -> None:
        self._queue: list[LiveRequest] = []  # all suspects, in the order of their trials
        self._cases: list[_CrashCase] = []

    def __len__(self) -> int:
        """Number of live requests under suspicion now or before."""
        return len(self._queue)

    def crashed(self, candidates: Candidates, lost: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Record a crash of a worker with the requests ``lost``; return the convicted requests."""
        convicted = [request for request in lost if _convicts(request, candidates)]
        for request in convicted:
            self.ended(request)
        if len(candidates.models) == 1 and candidates.requests and not convicted:
            case = _CrashCase(next(iter(candidates.models)), set(candidates.requests))
            self._cases = [*self._cases[-_MAX_CASES:], case]
        for request in lost:
            if request in convicted:
                continue
            if request.request_id in candidates.requests:
                self._suspect(request)
            elif (known := request.suspect) is not None and not known.is_cleared:
                known.is_held, known.tried_since_s = True, None
        return convicted

    def next_trial(self, now_s: float) -> LiveRequest | None:
        """Return the suspect to try now, None during a trial or without suspects."""
        suspects = [(request, request.suspect) for request in self._queue if request.suspect]
        since_s = (suspect.tried_since_s for _, suspect in suspects)
        if any(at_s is not None and now_s - at_s < _TRIAL_S for at_s in since_s):
            return None
        for request, suspect in suspects:
            if suspect.is_held:
                suspect.is_held, suspect.tried_since_s = False, now_s
                return request
        return None

    def take_attributed(self) -> list[str]:
        """Return the models to which earlier crashes are attributed: all requests are cleared."""
        models = [case.model for case in self._cases if not case.requests]
        self._cases = [case for case in self._cases if case.requests]
        return models

    def progressed(self, request: LiveRequest) -> bool:
        """Clear a suspect with enough tokens; return whether the request is cleared now."""
        suspect = request.suspect
        if suspect is None or len(request.output_token_ids) < suspect.num_tokens + PASSED_TOKENS:
            return False
        return self.clear(request)

    def clear(self, request: LiveRequest) -> bool:
        """Clear a suspect on trial; return False for any other request."""
        suspect = request.suspect
        if suspect is None or suspect.is_cleared or suspect.is_held:
            return False
        suspect.is_cleared, suspect.tried_since_s = True, None
        for case in self._cases:
            case.requests.discard(request.request_id)
        return True

    def ended(self, request: LiveRequest) -> None:
        """Record the end of a request; crashes with the request as a candidate stay unexplained."""
        if request.suspect is not None:
            request.suspect = None
            self._queue.remove(request)
            self._cases = [case for case in self._cases if request.request_id not in case.requests]

    def _suspect(self, request: LiveRequest) -> None:
        num_tokens, known = len(request.output_token_ids), request.suspect
        if known is None:
            request.suspect = Suspect(num_tokens)
            self._queue.append(request)
            return
        known.num_crashes += known.is_cleared  # an unclear trial is repeated
        known.num_tokens = num_tokens
        known.is_held, known.is_cleared, known.tried_since_s = True, False, None


def _convicts(request: LiveRequest, candidates: Candidates) -> bool:
    """Return whether a crash convicts a request; count an unclear trial."""
    suspect = request.suspect
    if suspect is None or request.request_id not in candidates.requests:
        return False
    if not suspect.is_isolated or suspect.is_held:
        return False
    if candidates.only_request == request.request_id:
        return True
    suspect.num_unclear_trials += suspect.tried_since_s is not None
    return suspect.num_unclear_trials >= _MAX_UNCLEAR_TRIALS


class Isolation:
    """Suspects of one daemon; records events and returns verdicts, but starts no request."""

    def __init__(self, live: LiveRequests, history: History, orders: WorkerOrders) -> None:
        self._live = live
        self._history = history
        self._orders = orders
        self._suspects = Suspects()

    def worker_down(self, lost: Sequence[LiveRequest], candidates: Candidates) -> list[LiveRequest]:
        """Hold the suspects among the requests ``lost`` with a worker; return the convicted."""
        convicted = self._suspects.crashed(candidates, lost)
        held = [request for request in lost if request.is_held]
        for request in held:
            request.device = None
        for model, num in sorted(Counter(request.model for request in held).items()):
            text = f"{num} request{'s' * (num != 1)} may have crashed the worker: retried alone"
            self._history.record_event("warning", "requests_suspected", model, text)
        return convicted

    def convicted(self, request: LiveRequest) -> None:
        """Record a convicted request that has been ended."""
        text = f"request {request.request_id} crashed a worker when retried alone"
        self._history.record_event("error", "request_convicted", request.model, text)

    def next_trial(self, now_s: float) -> LiveRequest | None:
        """Return the suspect to start now, None during a trial or without held suspects."""
        request = self._suspects.next_trial(now_s) if len(self._suspects) else None
        if request is not None:
            _logger.info("request %s of %s is retried alone", request.request_id, request.model)
        return request

    def progressed(self, outputs: m.StepOutputs) -> list[LiveRequest]:
        """Record tokens; return the suspects past the point of the crash, to share steps again."""
        cleared: list[LiveRequest] = []
        for item in outputs.progress if len(self._suspects) else ():
            request = self._live.get(item.request_id)
            if request is not None and self._suspects.progressed(request):
                _logger.info("request %s of %s is cleared", request.request_id, request.model)
                self._orders.end_isolation(request)
                cleared.append(request)
        return cleared

    def ended(self, request: LiveRequest, *, is_whole: bool) -> None:
        """Record the end of a request, of its own accord if ``is_whole``."""
        if is_whole:
            self._suspects.clear(request)
        self._suspects.ended(request)

    def take_attributed(self) -> list[str]:
        """Return the models to which crashes are attributed now, as all suspects are cleared."""
        return self._suspects.take_attributed()
