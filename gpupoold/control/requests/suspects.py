"""Trials of requests that may have crashed a worker, one at a time. Pure.

A crash makes *suspects* of all its candidate requests. A suspect is held back until its trial, in
which the suspect shares no step with other requests. A suspect that gets past the point of the
crash is cleared. A suspect whose trial crashes the worker, with no other candidate, is convicted
and ends with an error. A request that is suspected again after it was cleared runs alone to its
end, so that no combination of requests can crash workers for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpupoold.control.processes.crash_attribution import Candidates

PASSED_TOKENS = 4
"""So many tokens more than at the crash clear a suspect: more than steps are under way at once."""
_MAX_UNCLEAR_TRIALS = 3
_MAX_CASES = 31
# A suspect whose model has no turn for so long lets the next one be tried beside it.
_TRIAL_S = 10.0


@dataclass(slots=True)
class _Suspect:
    num_tokens: int  # that it had at the crash
    num_crashes: int = 1
    num_unclear_trials: int = 0
    tried_since_s: float | None = None
    is_held: bool = True
    is_cleared: bool = False

    @property
    def is_isolated(self) -> bool:
        return not self.is_cleared or self.num_crashes > 1


@dataclass(slots=True)
class _CrashCase:
    """A crash due to ``model`` or to one of ``requests``; cleared requests are removed."""

    model: str
    requests: set[str]


class Suspects:
    """All suspects of a daemon; instants in seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}  # in the order in which they are tried
        self._cases: list[_CrashCase] = []

    def __len__(self) -> int:
        """Number of past and present suspects."""
        return len(self._suspects)

    def is_held(self, request_id: str) -> bool:
        """Return whether the request waits for its trial."""
        suspect = self._suspects.get(request_id)
        return suspect is not None and suspect.is_held

    def is_isolated(self, request_id: str) -> bool:
        """Return whether the request may not share a step."""
        suspect = self._suspects.get(request_id)
        return suspect is not None and suspect.is_isolated

    def crashed(self, candidates: Candidates, num_tokens_of: Mapping[str, int]) -> list[str]:
        """Record a crash of a worker; return the convicted requests.

        ``num_tokens_of`` has the worker's live requests and their numbers of tokens.
        """
        convicted = [one for one in sorted(candidates.requests) if self._convicts(one, candidates)]
        for request_id in convicted:
            self.ended(request_id)
        if len(candidates.models) == 1 and candidates.requests and not convicted:
            case = _CrashCase(next(iter(candidates.models)), set(candidates.requests))
            self._cases = [*self._cases[-_MAX_CASES:], case]
        for request_id, num_tokens in num_tokens_of.items():
            if request_id in convicted:
                continue
            if request_id in candidates.requests:
                self._suspect(request_id, num_tokens)
            elif (known := self._suspects.get(request_id)) is not None and not known.is_cleared:
                known.is_held, known.tried_since_s = True, None
        return convicted

    def next_trial(self, now_s: float) -> str | None:
        """Return the suspect to try now, None during a trial or without suspects."""
        since_s = (one.tried_since_s for one in self._suspects.values())
        if any(at_s is not None and now_s - at_s < _TRIAL_S for at_s in since_s):
            return None
        for request_id, suspect in self._suspects.items():
            if suspect.is_held:
                suspect.is_held, suspect.tried_since_s = False, now_s
                return request_id
        return None

    def take_charges(self) -> list[str]:
        """Return the models that turned out to have caused earlier crashes.

        All other candidates of these crashes have been cleared.
        """
        charges = [case.model for case in self._cases if not case.requests]
        self._cases = [case for case in self._cases if case.requests]
        return charges

    def progressed(self, request_id: str, num_tokens: int) -> bool:
        """Record a request's number of tokens; return whether the request is cleared now."""
        suspect = self._suspects.get(request_id)
        if suspect is None or suspect.is_cleared or suspect.is_held:
            return False
        if num_tokens < suspect.num_tokens + PASSED_TOKENS:
            return False
        suspect.is_cleared, suspect.tried_since_s = True, None
        for case in self._cases:
            case.requests.discard(request_id)
        return True

    def ended(self, request_id: str) -> None:
        """Record the end of a request; its unexplained crashes stay unexplained."""
        if self._suspects.pop(request_id, None) is not None:
            self._cases = [case for case in self._cases if request_id not in case.requests]

    def _convicts(self, request_id: str, candidates: Candidates) -> bool:
        suspect = self._suspects.get(request_id)
        if suspect is None or not suspect.is_isolated or suspect.is_held:
            return False
        if candidates.only_request == request_id:
            return True
        suspect.num_unclear_trials += suspect.tried_since_s is not None
        return suspect.num_unclear_trials >= _MAX_UNCLEAR_TRIALS

    def _suspect(self, request_id: str, num_tokens: int) -> None:
        known = self._suspects.get(request_id)
        if known is None:
            self._suspects[request_id] = _Suspect(num_tokens)
            return
        known.num_crashes += known.is_cleared  # a trial that was unclear is made again
        known.num_tokens = num_tokens
        known.is_held, known.is_cleared, known.tried_since_s = True, False, None
