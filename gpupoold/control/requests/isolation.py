"""Retry of suspect requests (:mod:`gpupoold.control.requests.suspects`), one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from gpupool_state import History
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.processes.crash_attribution import Candidates
from gpupoold.control.requests.orders import WorkerOrders
from gpupoold.control.requests.suspects import Suspects
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


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
        held = [one for one in lost if one.is_held]
        for request in held:
            request.device = None
        for model, num in sorted(Counter(one.model for one in held).items()):
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
        """Record tokens; return the suspects beyond the point of the crash: they share steps
        again.
        """
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
