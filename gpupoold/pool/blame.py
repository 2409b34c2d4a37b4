"""Why a worker ended, whose fault it was, and when a model has done so too often. Pure."""

from __future__ import annotations

import signal
from collections import defaultdict
from dataclasses import dataclass

from gpupoold.process import OUT_OF_MEMORY_STATUS

QUARANTINE_DEATHS = 2
QUARANTINE_WINDOW_S = 600.0

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
    """The end of a worker. At fault: what ran in it ended it, and may do so again."""

    reason: str
    is_at_fault: bool


def death_of(status: int | None, ended_for: str = "", *, saw_oom_kill: bool = False) -> Death:
    """The death of a process with this exit status (negative: a signal; None: not known).

    ``ended_for`` is why the daemon has killed it, if it has. ``saw_oom_kill``: the kernel has
    killed some process for memory in the moment before.
    """
    if ended_for:
        return Death(ended_for, True)
    if status is None:
        return Death("it left, and its exit status is not known", False)
    if status == OUT_OF_MEMORY_STATUS:
        return Death("out of memory", True)
    if status == -signal.SIGKILL and saw_oom_kill:
        return Death("out of memory: killed by the kernel", True)
    if status < 0:
        return Death(f"signal {-status}", -status in _OWN_FAULTS)
    return Death(f"exit status {status}", status != 0)


@dataclass(frozen=True, slots=True)
class _Charge:
    at_s: float
    device: int


class Blame:
    """Deaths by the model that ran or was being loaded, and the models that are in quarantine.

    Instants are seconds of any one monotonic clock.
    """

    def __init__(self) -> None:
        self._charges: defaultdict[str, list[_Charge]] = defaultdict(list)
        self._quarantined: dict[str, str] = {}

    def reason(self, model: str) -> str | None:
        """Why the model is in quarantine; None when it is not."""
        return self._quarantined.get(model)

    def charge(self, model: str, device: int, death: Death, now_s: float) -> str | None:
        """A death that is the model's fault; why it is put into quarantine, if it is now."""
        recent = [one for one in self._charges[model] if now_s - one.at_s < QUARANTINE_WINDOW_S] + [
            _Charge(now_s, device)
        ]
        self._charges[model] = recent
        if len(recent) < QUARANTINE_DEATHS or model in self._quarantined:
            return None
        devices = sorted({one.device for one in recent})
        where = (
            f"worker of device {device} twice"
            if len(devices) == 1
            else f"workers of devices {' and '.join(map(str, devices))}"
        )
        self._quarantined[model] = f"ended the {where}: {death.reason}"
        return self._quarantined[model]

    def forgive(self, model: str) -> None:
        """Somebody wants it tried again, or it is gone: what was is forgotten."""
        self._charges.pop(model, None)
        self._quarantined.pop(model, None)
