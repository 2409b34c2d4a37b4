"""Accounts of requests, turns and switches: counters, rows of the history, use of API keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from gpupool_state import History
from gpupoold.control.access.keyring import Keyring
from gpupoold.control.accounting.meters import Meters
from gpupoold.control.accounting.model_stats import ModelStats, SwitchStats
from gpupoold.control.accounting.turns import TurnLog
from gpupoold.control.accounting.usage import UsageMeter
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.requests.rows import request_row
from gpupoold.control.requests.tokens import TokenCounter
from gpupoold.domain import FinishReason
from gpupoold.scheduling.state import State
from gpupoold.stats.histogram import Histogram
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
        self._tokens = TokenCounter(live, self.stats, state, self.charge)

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Count tokens for the rate of a key."""
        if self._keys is not None:
            self._keys.charge(key_id, num_tokens)

    def paced(self, gaps: Mapping[str, str]) -> None:
        """Count the times between tokens of paced streams, from a frontend's histograms by model.

        Raises:
            ValueError: a histogram is malformed.
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
        self.meters.model(request.counted_name).finished[reason] += 1
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
        self._tokens.stepped(number, message)

    def _count_use(self, number: int, message: m.StepOutputs) -> None:
        device = self._state.devices.get(number)
        batch = None if device is None else device.batches.get(message.model)
        if batch is None:
            return
        found = (self._live.get(one.request_id) for one in message.progress if one.num_tokens)
        requests = [one for one in found if one is not None]
        since_s = self._tokens.only_steps_since_s(number, message.model)
        self.usage.stepped(number, requests, since_s, message.at_s, batch.step_s())

    def first_tokens(self, number: int, message: m.StepOutputs) -> dict[int, list[m.FirstToken]]:
        """Return how the requests waited whose first token is in a step, by frontend.

        :meth:`stepped` has not counted the step.
        """
        found: dict[int, list[m.FirstToken]] = {}
        for request in self._tokens.first_tokens(number, message):
            stages = self._tokens.stages_of(request, number, message.at_s)
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
        self._tokens.switched(switch)
        self.turns.switched(switch)
        self._history.record_switch(switch)

    def worker_down(self, number: int) -> None:
        """Record the end of a worker and of the present turn."""
        self.meters.device(number).worker_ended()
        self.turns.worker_down(number)
