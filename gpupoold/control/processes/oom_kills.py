"""Detection of kills by the kernel for lack of memory."""

from __future__ import annotations

from collections import deque
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
# A kill may be counted up to this long before the death of the process.
_MOMENT_S = 3.0


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
