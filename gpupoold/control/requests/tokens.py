"""Counts of sent tokens, and the causes of late tokens."""

from __future__ import annotations

from collections.abc import Callable

from gpupoold.control.accounting.model_stats import Counts, ModelStats
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.scheduling.state import State
from gpupoold.wire import messages as m


class TokenCounter:
    """Adds the tokens of steps to requests and to models' counts.

    ``charge`` takes the id of a request's key and a number of tokens.
    """

    def __init__(
        self,
        live: LiveRequests,
        stats: dict[str, ModelStats],
        state: State,
        charge: Callable[[str, int], None],
    ) -> None:
        self._live = live
        self._stats = stats
        self._state = state
        self._charge = charge
        self._switches: dict[int, m.SwitchRecord] = {}

    def switched(self, switch: m.SwitchRecord) -> None:
        """Record a switch as a possible cause of lateness."""
        self._switches[switch.device] = switch

    def stepped(self, number: int, message: m.StepOutputs) -> None:
        """Count the tokens of a step, before the core counts the tokens."""
        if message.drafts is not None and message.model in self._stats:
            stats = self._stats[message.model]
            stats.drafts = stats.drafts.plus(message.drafts)
        for item in message.progress:
            request = self._live.get(item.request_id)
            if request is None:
                continue
            if request.key_id:
                self._charge(request.key_id, len(item.new_token_ids))
            stats, num_before = self._stats[request.counted_name], len(request.token_times_s)
            lost_s = stats.add_tokens(
                request, item.new_token_ids, message.at_s, has_result=item.has_result
            )
            if lost_s > 0:
                times_s = request.token_times_s
                since_s = times_s[num_before - 1] if num_before else request.arrival_s
                self._attribute(stats.now, request, number, since_s, message.at_s, lost_s)

    def _attribute(
        self,
        counts: Counts,
        request: LiveRequest,
        number: int,
        since_s: float,
        at_s: float,
        lost_s: float,
    ) -> None:
        """Divide ``lost_s`` by cause over the time from ``since_s`` to ``at_s``.

        The causes in order: warming the model, waiting for a turn, the switch, the model's steps.
        """
        warm_s = min(max(request.warmed_s or since_s, since_s), at_s)
        device = self._state.devices.get(number)
        turn = device.turn if device is not None else None
        began_s = warm_s
        if device is not None and turn is not None and turn.model == request.model:
            began_s = min(max(device.turn_began_s, warm_s), at_s)
        switching_s = 0.0
        switch = self._switches.get(number)
        if switch is not None and switch.model == request.model:
            end_s = min(switch.at_s + switch.total_s, at_s)
            switching_s = max(end_s - max(switch.at_s, began_s), 0.0)
        share = lost_s / max(at_s - since_s, 1e-9)
        counts.lateness.loading_s += share * (warm_s - since_s)
        counts.lateness.queueing_s += share * (began_s - warm_s)
        counts.lateness.switching_s += share * switching_s
        counts.lateness.computing_s += share * (at_s - began_s - switching_s)
