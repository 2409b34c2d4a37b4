"""Facts about the limits of processes."""

from __future__ import annotations

import resource
from contextlib import suppress

from gpupoold.doctor.facts import LimitFacts


def limit_facts(pid: int | None = None) -> LimitFacts:
    """Return the limits of process ``pid``, the daemon, if readable; else this process's limits."""
    kinds = (
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
        resource.RLIMIT_MEMLOCK,
        resource.RLIMIT_AS,
    )
    if pid is not None:
        with suppress(OSError):
            return LimitFacts("the daemon", *(_soft(resource.prlimit(pid, one)) for one in kinds))
    return LimitFacts("this shell", *(_soft(resource.getrlimit(one)) for one in kinds))


def _soft(limit: tuple[int, int]) -> int | None:
    return None if limit[0] == resource.RLIM_INFINITY else limit[0]
