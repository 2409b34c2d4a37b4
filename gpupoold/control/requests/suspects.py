"""Trials of requests that may have crashed a worker, one at a time.

A crash makes *suspects* of all candidate requests. A suspect is held back until a trial without
other requests in the steps. A suspect beyond the point of the crash is cleared. A trial that
crashes the worker, with no other candidate, convicts the suspect, which ends with an error. A
request under suspicion a second time runs alone to the end: no combination of requests can crash
workers without end. ``Suspects`` is pure; ``Isolation`` holds and retries requests by the verdicts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpupool_state import History
from gpupoold.control.live_requests import LiveRequest, LiveRequests, Suspect
from gpupoold.control.processes.crash_attribution import Candidates
from gpupoold.control.requests.core_shell import WorkerOrders
from gpupoold.wire import messages as m

PASSED_TOKENS = 4
"""Tokens after the crash that clear a suspect: more than the steps under way at once."""
_MAX_UNCLEAR_TRIALS = 3
_MAX_CASES = 31
# After this time without an outcome the next trial begins beside the present trial.
_TRIAL_S = 10.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _CrashCase:
    """A crash due to ``model`` or to one of ``requests``; cleared requests are removed."""

    model: str
    requests: set[str]


class Suspects:
    """All suspects of a daemon; times are seconds of one monotonic clock.

    The record of each request has the state as a suspect.
    """

    def __init__(self) -> None:
        self._queue: list[LiveRequest] = []  # all suspects, in the order of their trials
        self._cases: list[_CrashCase] = []

    def __len__(self) -> int:
        """Number of live requests under suspicion now or before."""
        return len(self._queue)

    def crashed(self, candidates: Candidates, lost: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Record a crash of a worker with the requests ``lost``; return the convicted requests."""
        convicted = [one for one in lost if _convicts(one, candidates)]
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
        suspects = [(one, one.suspect) for one in self._queue if one.suspect is not None]
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
            self._cases = [one for one in self._cases if request.request_id not in one.requests]

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
