"""Retry of suspect requests (:mod:`gpupoold.control.requests.suspects`), one at a time."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from gpupool_state import History
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.control.processes.crash_attribution import Candidates
from gpupoold.control.requests.ports import Verdicts
from gpupoold.control.requests.suspects import Suspects
from gpupoold.domain import FinishReason
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class Isolation:
    """Retries of suspects for one dispatcher.

    ``start_anew`` schedules a request without a worker, ``fail`` ends requests with an error,
    ``send`` takes a worker's number and a message.
    """

    def __init__(
        self,
        live: LiveRequests,
        history: History,
        start_anew: Callable[[LiveRequest], None],
        fail: Callable[[list[LiveRequest], str], None],
        send: Callable[[int, m.EndIsolation], None],
    ) -> None:
        self._live = live
        self._history = history
        self._start_anew = start_anew
        self._fail = fail
        self._send = send
        self._suspects = Suspects()
        self.verdicts: Verdicts | None = None

    def is_held(self, request_id: str) -> bool:
        return self._suspects.is_held(request_id)

    def is_isolated(self, request_id: str) -> bool:
        return self._suspects.is_isolated(request_id)

    def worker_down(self, lost: Sequence[LiveRequest], candidates: Candidates, reason: str) -> None:
        """Requeue the requests ``lost`` with a dead worker.

        Suspects are held back; convicted requests end.
        """
        num_tokens = {one.request_id: len(one.output_token_ids) for one in lost}
        ids = self._suspects.crashed(candidates, num_tokens)
        convicted = [one for one in lost if one.request_id in ids]
        self._note_held([one for one in lost if self.is_held(one.request_id)])
        for request in lost:
            if self.is_held(request.request_id):
                request.device = None
            elif request.request_id not in ids:
                self._start_anew(request)
        self._fail(convicted, f"the request ended its worker, and another alone: {reason}")
        for request in convicted:
            text = f"request {request.request_id} ended a worker while it was tried alone"
            self._history.record_event("error", "request_convicted", request.model, text)
            if self.verdicts is not None:
                self.verdicts.convicted(request.model, request.request_id)
        self.go_on(time.monotonic())

    def go_on(self, now_s: float) -> None:
        """Let the next suspect be tried, if none is being tried."""
        while (request_id := self._suspects.next_trial(now_s)) is not None:
            request = self._live.get(request_id)
            if request is not None:
                _logger.info("request %s of %s is tried alone", request_id, request.model)
                self._start_anew(request)

    def progressed(self, outputs: m.StepOutputs) -> None:
        """Record tokens: a suspect that got past the crash shares steps again."""
        if not len(self._suspects):
            return
        for item in outputs.progress:
            request = self._live.get(item.request_id)
            if request is None:
                continue
            if self._suspects.progressed(item.request_id, len(request.output_token_ids)):
                self._cleared(request)
        self.go_on(time.monotonic())

    def ended(self, request: LiveRequest, reason: FinishReason) -> None:
        """Record the end of a request."""
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if len(self._suspects):
            if is_whole and self._suspects.progressed(request.request_id, _ANY):
                self._charge()
            self._suspects.ended(request.request_id)
        if is_whole and self.verdicts is not None:
            self.verdicts.answered(request.model)

    def _note_held(self, held: Sequence[LiveRequest]) -> None:
        for model, num in sorted(Counter(one.model for one in held).items()):
            text = f"{num} request{'s' * (num != 1)} may have ended the worker: tried alone"
            self._history.record_event("warning", "requests_suspected", model, text)

    def _cleared(self, request: LiveRequest) -> None:
        _logger.info("request %s of %s is cleared", request.request_id, request.model)
        if request.device is not None and not self.is_isolated(request.request_id):
            self._send(request.device, m.EndIsolation(request.model, request.request_id))
        self._charge()
        if self.verdicts is not None:
            self.verdicts.answered(request.model)

    def _charge(self) -> None:
        for model in self._suspects.take_charges():
            if self.verdicts is not None:
                self.verdicts.left_over(model)


# More tokens than any request had at a crash.
_ANY = 1 << 62
