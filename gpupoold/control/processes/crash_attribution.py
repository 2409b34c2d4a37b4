"""The cause of a worker's death, and the requests or models that may have caused it."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.system.process import OUT_OF_MEMORY_STATUS

# Signals caused by the process's own code; all other signals come from outside.
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

VMSTAT = Path("/proc/vmstat")
# A kill may be counted up to this long before the death of the process.
_MOMENT_S = 3.0


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker; ``is_at_fault`` if code in the worker ended the worker.

    ``activities`` are the activities of the worker's threads.
    """

    reason: str
    is_at_fault: bool
    activities: tuple[Activity, ...] = ()

    @property
    def doing(self) -> str:
        """The worker's activity in words, empty if all threads were idle."""
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
    """Return the death for an exit status; a negative status is a signal, None is unknown.

    ``ended_for`` is the daemon's reason for killing the process. ``saw_oom_kill`` means that the
    kernel killed some process for memory just before.
    """
    reason, is_at_fault = _cause(status, ended_for, saw_oom_kill=saw_oom_kill)
    return Death(reason, is_at_fault, tuple(activities))


def _cause(status: int | None, ended_for: str, *, saw_oom_kill: bool) -> tuple[str, bool]:
    if ended_for:
        return ended_for, True
    if status is None:
        return "exit status unknown", False
    if status == OUT_OF_MEMORY_STATUS:
        return "out of memory", True
    if status == -signal.SIGKILL and saw_oom_kill:
        return "out of memory: killed by the kernel", True
    if status < 0:
        return f"signal {-status}", -status in _OWN_FAULTS
    return f"exit status {status}", status != 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Possible causes of a crash: one of these requests or models.

    ``has_unknown`` means that the cause may be absent from the activity page.
    """

    requests: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    has_unknown: bool = False

    @property
    def only_request(self) -> str | None:
        """The request, if no other cause is possible."""
        if len(self.requests) != 1 or self.models or self.has_unknown:
            return None
        return next(iter(self.requests))

    @property
    def only_model(self) -> str | None:
        """The model, if no other cause is possible; copies are part of loads and switches."""
        if len(self.models) != 1 or self.requests:
            return None
        return next(iter(self.models))


NOBODY = Candidates()


def candidates_of(death: Death, model_of: Mapping[str, str]) -> Candidates:
    """Return the possible causes of a death, none unless the worker was at fault.

    ``model_of`` has the worker's live requests with their models.
    """
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


class OomKills:
    """The kernel's count of out-of-memory kills, including cgroup limits, sampled over time.

    The count names no process: a process killed for another reason at the same moment is
    misattributed.
    """

    def __init__(self, now_s: float, path: Path = VMSTAT) -> None:
        self._path = path
        self._seen: deque[tuple[float, int]] = deque()
        self.check(now_s)

    def check(self, now_s: float) -> None:
        """Sample the count; to be called about every second."""
        while self._seen and now_s - self._seen[0][0] > _MOMENT_S and len(self._seen) > 1:
            self._seen.popleft()
        self._seen.append((now_s, self._count()))

    def is_new(self) -> bool:
        """Return whether a kill happened in the last seconds."""
        return self._count() > self._seen[0][1]

    def _count(self) -> int:
        """Return the count, 0 if unavailable."""
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
