"""Accounts of requests, turns and switches: counters, rows of the history, use of API keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpupool_state import History, RequestRow
from gpupoold.control.access import Keyring
from gpupoold.control.accounting.meters import Meters, TurnLog, UsageMeter
from gpupoold.control.accounting.model_stats import ModelStats, SwitchStats
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.domain import DeviceId, FinishReason, ModelName
from gpupoold.durations import Lateness, RequestStages
from gpupoold.scheduling.state import DeviceState, State
from gpupoold.stats.histogram import Histogram, percentile
from gpupoold.wire import messages as m


class Accounts:
    """All accounts of a daemon. ``clock`` returns seconds.

    A message of a worker is counted before the scheduling core gets the message.
    """

    def __init__(
        self,
        history: History,
        live: LiveRequests,
        state: State,
        keys: Keyring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats: dict[str, ModelStats] = {}
        self.switches = SwitchStats()
        self.meters = Meters()
        self.turns = TurnLog()
        self._history = history
        self._keys = keys
        self._clock = clock
        self.usage = UsageMeter(history)
        self._live = live
        self._state = state
        self._switches: dict[int, m.SwitchRecord] = {}  # the latest of each device

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Count tokens for the rate of a key."""
        if self._keys is not None:
            self._keys.charge(key_id, num_tokens)

    def paced(self, gaps: Mapping[str, str]) -> None:
        """Count the times between tokens of paced streams, from a frontend's histograms by model.

        Raises ValueError: a histogram is malformed.
        """
        for model, text in gaps.items():
            self.stats.setdefault(model, ModelStats()).paced.merge(Histogram.parse(text))

    def admitted(self, message: m.AddRequest, *, is_warm: bool) -> None:
        """Count an admitted request; ``is_warm`` if the model is in host memory."""
        self.meters.arrived(message, is_warm=is_warm)
        self.stats.setdefault(message.counted_name, ModelStats()).now.requests += 1
        if self._keys is not None:
            self._keys.used(message.key_id, num_requests=1)

    def ended(self, request: LiveRequest, reason: FinishReason, error: str) -> None:
        """Count the end of a request, and write a row of the history."""
        self.meters.models[request.counted_name].finished[reason] += 1
        self.stats[request.counted_name].end(reason)
        row = request_row(request, reason, error, self._clock(), time.time())
        self._history.record_request(row)
        self.usage.ended(request)
        if self._keys is not None:
            num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
            self._keys.used(request.key_id, num_tokens=num_tokens)

    def stepped(self, number: int, message: m.StepOutputs) -> None:
        """Count the tokens of a worker's step."""
        self.turns.stepped(number, message)
        self._count_use(number, message)
        self._count_tokens(number, message)

    def _count_use(self, number: int, message: m.StepOutputs) -> None:
        device = self._state.devices.get(number)
        batch = None if device is None else device.batches.get(message.model)
        if batch is None:
            return
        found = (self._live.get(item.request_id) for item in message.progress if item.num_tokens)
        requests = [request for request in found if request is not None]
        since_s = self._turn_start(number, message.model).only_steps_since_s
        self.usage.stepped(number, requests, since_s, message.at_s, batch.step_s())

    def first_tokens(self, number: int, message: m.StepOutputs) -> dict[int, list[m.FirstToken]]:
        """Return how the requests waited whose first token is in a step, by frontend.

        :meth:`stepped` has not counted the step.
        """
        found: dict[int, list[m.FirstToken]] = {}
        device = self._state.devices.get(number)
        batch = None if device is None else device.working.get(message.model)
        if batch is None or not batch.num_waiting:
            return found
        start = self._turn_start(number, message.model)
        for request in (self._live.get(item.request_id) for item in message.progress):
            if request is None or request.token_times_s:
                continue
            warmed_s, attached_s = request.warmed_s, request.attached_s
            stages = start.divide(request.arrival_s, message.at_s, warmed_s, attached_s)
            first = m.FirstToken(
                request.request_id,
                number,
                stages.loading_s,
                stages.queueing_s,
                stages.switching_s + stages.kv_s,
                stages.computing_s,
            )
            found.setdefault(request.frontend, []).append(first)
        return found

    def turn_ended(self, number: int, message: m.TurnReport) -> None:
        """Count a worker's turn."""
        self.meters.turn_ended(number, message)
        self.turns.ended(number, message)

    def switched(self, switch: m.SwitchRecord) -> None:
        """Count a switch, and write a row of the history."""
        self.meters.switched(switch)
        self.switches.add(switch)
        self._switches[switch.device] = switch
        self.turns.switched(switch)
        self._history.record_switch(switch)

    def worker_down(self, number: int) -> None:
        """Record the end of a worker and of the present turn."""
        self.meters.devices[number].worker_ended()
        self.turns.worker_down(number)

    def _turn_start(self, number: int, model: str) -> TurnStart:
        return TurnStart.of(model, self._state.devices.get(number), self._switches.get(number))

    def _count_tokens(self, number: int, message: m.StepOutputs) -> None:
        """Add the tokens of a step to requests and to models' counts."""
        if message.drafts is not None and message.model in self.stats:
            stats = self.stats[message.model]
            stats.drafts = stats.drafts.plus(message.drafts)
        start = self._turn_start(number, message.model)
        only_steps_since_s, at_s = start.only_steps_since_s, message.at_s
        for item in message.progress:
            request = self._live.get(item.request_id)
            if request is None:
                continue
            if request.is_background:
                ids, has_result = item.new_token_ids, item.has_result
                request.add_tokens(ids, at_s, has_result=has_result)
                self.stats[request.counted_name].background_tokens += len(ids) + has_result
                continue
            if request.key_id:
                self.charge(request.key_id, len(item.new_token_ids))
            stats, times_s = self.stats[request.counted_name], request.token_times_s
            num_before = len(times_s)
            lost_s = stats.add_tokens(request, item.new_token_ids, at_s, has_result=item.has_result)
            if len(times_s) == num_before:
                continue
            since_s = times_s[num_before - 1] if num_before else request.arrival_s
            now = stats.now
            sums = now.between_tokens if num_before else now.first_token
            warmed_s, attached_s = request.warmed_s, request.attached_s
            if (
                since_s < only_steps_since_s
                or (warmed_s is not None and since_s < warmed_s)
                or (attached_s is not None and since_s < attached_s)
            ):
                stages = start.divide(since_s, at_s, warmed_s, attached_s)
                sums.add(stages)
                if lost_s > 0:
                    _add_lateness(now.lateness, lost_s, stages, at_s - since_s)
            else:
                sums.computing_s += at_s - since_s
                now.lateness.computing_s += lost_s


class TurnStart(NamedTuple):
    """The beginning of a model's present turn on a device, in monotonic seconds.

    The turn began at ``began_s``, and its switch lasted from ``switch_began_s`` to
    ``switch_ended_s``; ``kv_share`` is the share of the switch that brought KV in.
    """

    began_s: float = -math.inf
    switch_began_s: float = -math.inf
    switch_ended_s: float = -math.inf
    kv_share: float = 0.0

    @classmethod
    def of(cls, model: str, device: DeviceState | None, switch: m.SwitchRecord | None) -> TurnStart:
        """Return the beginning from a device's turn and latest switch, each if of the model."""
        turn = None if device is None else device.turn
        began_s = -math.inf
        if device is not None and turn is not None and turn.model == model:
            began_s = device.turn_began_s
        if switch is None or switch.model != model:
            return cls(began_s)
        kv_share = switch.kv_s / switch.total_s if switch.total_s else 0.0
        return cls(began_s, switch.at_s, switch.at_s + switch.total_s, min(kv_share, 1.0))

    @property
    def only_steps_since_s(self) -> float:
        """Time after which the model has only computed."""
        return max(self.began_s, self.switch_ended_s)

    def divide(
        self, since_s: float, at_s: float, warmed_s: float | None, attached_s: float | None
    ) -> RequestStages:
        """Divide the time of a request from ``since_s`` to its token at ``at_s`` by stage.

        ``warmed_s`` is the time when the model was in host memory, ``attached_s`` the time when the
        device had the request's KV from another device, each None if the request did not wait. The
        sum of the stages is ``at_s - since_s``.
        """
        warm_s = min(max(warmed_s or since_s, since_s), at_s)
        began_s = min(max(self.began_s, warm_s), at_s)
        switch_ended_s = min(max(self.switch_ended_s, began_s), at_s)
        switch_s = max(switch_ended_s - max(self.switch_began_s, began_s), 0.0)
        transfer_s = max(min(attached_s or switch_ended_s, at_s) - switch_ended_s, 0.0)
        kv_s = switch_s * self.kv_share
        return RequestStages(
            warm_s - since_s,
            began_s - warm_s,
            switch_s - kv_s,
            kv_s + transfer_s,
            at_s - began_s - switch_s - transfer_s,
        )


def _add_lateness(lateness: Lateness, lost_s: float, stages: RequestStages, time_s: float) -> None:
    """Divide ``lost_s`` seconds of lateness as ``stages`` divide ``time_s``."""
    share = lost_s / max(time_s, 1e-9)
    lateness.loading_s += share * stages.loading_s
    lateness.queueing_s += share * stages.queueing_s
    lateness.switching_s += share * (stages.switching_s + stages.kv_s)
    lateness.computing_s += share * stages.computing_s


def finish_reason(text: str) -> FinishReason:
    """Convert the engine's reason for the end of an answer."""
    try:
        return FinishReason(text)
    except ValueError:
        return FinishReason.STOP  # vLLM's newer reasons ("repetition") are kinds of stopping


def request_row(
    request: LiveRequest, reason: FinishReason, error: str, now_s: float, wall_now_s: float
) -> RequestRow:
    """Build the history row of a request that ends now. ``error``: the message for the client.

    ``now_s`` is monotonic, ``wall_now_s`` the same instant in seconds since the epoch.
    """
    gaps_s = request.gaps_s
    return RequestRow(
        request_id=request.request_id,
        model=ModelName(request.counted_name),
        device=None if request.device is None else DeviceId(request.device),
        arrived_at=wall_now_s - (now_s - request.arrival_s),
        ttft_s=request.ttft_s,
        tbt_p50_s=percentile(gaps_s, 0.5),
        tbt_p99_s=percentile(gaps_s, 0.99),
        tbt_max_s=max(gaps_s, default=None),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=len(request.token_times_s),
        num_tokens_in_time=request.num_in_time,
        finish_reason=reason,
        total_s=now_s - request.arrival_s,
        error=error,
        api_key=request.key_id or None,
    )
