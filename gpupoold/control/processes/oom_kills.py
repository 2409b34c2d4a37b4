"""Detection of kills by the kernel for lack of memory."""

from __future__ import annotations

from collections import deque
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
# So long before the death of a process a kill may have been counted.
_MOMENT_S = 3.0


class OomKills:
    """The kernel's count of such kills, including cgroup limits, sampled over time.

    The count names no process. A process killed otherwise at the same moment is taken for a victim.
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
        """Return the count, 0 if the kernel gives none."""
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
