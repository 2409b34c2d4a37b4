"""Why a worker ended, whether by its own fault, and what that can be due to. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.system.process import OUT_OF_MEMORY_STATUS

# What a process gets for what it does itself. Every other signal comes from somebody else.
_OWN_FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker. At fault: what ran in it ended it, and may do so again.

    ``activities`` are what its threads were doing.
    """

    reason: str
    is_at_fault: bool
    activities: tuple[Activity, ...] = ()

    @property
    def doing(self) -> str:
        """What the worker was doing, in words; empty if its threads were idle."""
        return " and ".join(dict.fromkeys(map(_in_words, self.activities)))


def _in_words(activity: Activity) -> str:
    what = f"{activity.phase.text} {activity.model}".rstrip()
    num_requests = len(activity.requests or ())
    if activity.phase is not ThreadPhase.STEP or not num_requests:
        return what
    return f"{what} with {num_requests} request{'s' * (num_requests != 1)}"


def death_of(
    status: int | None,
    ended_for: str = "",
    activities: Iterable[Activity] = (),
    *,
    saw_oom_kill: bool = False,
) -> Death:
    """The death of a process with this exit status (negative: a signal; None: not known).

    ``ended_for`` is why the daemon has killed it, if it has. ``saw_oom_kill``: the kernel has
    killed some process for memory in the moment before.
    """
    reason, is_at_fault = _cause(status, ended_for, saw_oom_kill=saw_oom_kill)
    return Death(reason, is_at_fault, tuple(activities))


def _cause(status: int | None, ended_for: str, *, saw_oom_kill: bool) -> tuple[str, bool]:
    if ended_for:
        return ended_for, True
    if status is None:
        return "it left, and its exit status is not known", False
    if status == OUT_OF_MEMORY_STATUS:
        return "out of memory", True
    if status == -signal.SIGKILL and saw_oom_kill:
        return "out of memory: killed by the kernel", True
    if status < 0:
        return f"signal {-status}", -status in _OWN_FAULTS
    return f"exit status {status}", status != 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a crash can be due to: one of these requests or models, or, if ``has_unknown``,
    something that the activity page has no name for."""

    requests: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    has_unknown: bool = False

    @property
    def only_request(self) -> str | None:
        """The request, if the crash cannot be due to anything else."""
        if len(self.requests) != 1 or self.models or self.has_unknown:
            return None
        return next(iter(self.requests))

    @property
    def only_model(self) -> str | None:
        """The model, if the crash cannot be due to anything else. Copies are part of a load and
        of a switch."""
        if len(self.models) != 1 or self.requests:
            return None
        return next(iter(self.models))


NOBODY = Candidates()


def candidates_of(death: Death, model_of: Mapping[str, str]) -> Candidates:
    """What a death can be due to; ``model_of`` are the live requests that the worker had, with
    their models. Nobody, unless the worker was at fault."""
    if not death.is_at_fault:
        return NOBODY
    requests: set[str] = set()
    models: set[str] = set()
    for activity in death.activities:
        if activity.phase.is_due_to_model:
            models.add(activity.model)
        requests.update(_requests_of(activity, model_of))
    has_unknown = any(one.phase is ThreadPhase.COPY for one in death.activities)
    return Candidates(frozenset(requests), frozenset(models), has_unknown)


def _requests_of(activity: Activity, model_of: Mapping[str, str]) -> list[str]:
    if activity.requests is None:
        return [one for one, model in model_of.items() if model == activity.model]
    if not activity.requests:
        return []
    return [one for one in model_of if digest(one) in activity.requests]
