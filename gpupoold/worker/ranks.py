"""The processes of a group: the leader forks one process per further rank."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from pathlib import Path
from typing import NamedTuple

from gpupoold.memory.group.link import Link
from gpupoold.system.process import OUT_OF_MEMORY_STATUS

_logger = logging.getLogger(__name__)


class RankLinks(NamedTuple):
    """A follower's links with the leader; each end is for one thread."""

    orders: Link
    loads: Link
    files: Link


class Rank(NamedTuple):
    """This process's place in its group.

    ``store`` is the empty file in which the ranks find each other. A leader has rank 0, and the
    links to each follower and its process; a follower has its links to the leader.
    """

    rank: int
    num_ranks: int
    store: Path
    links: tuple[RankLinks, ...]
    pids: tuple[int, ...] = ()


def fork_ranks(num_ranks: int, leader_fds: list[int]) -> Rank:
    """Fork the followers; return in each process its rank.

    To be called before the process has threads. Followers close ``leader_fds``.
    """
    store = Path(f"/proc/self/fd/{os.memfd_create('gpupool-ranks', 0)}")
    ours: list[RankLinks] = []
    pids: list[int] = []
    for rank in range(1, num_ranks):
        pairs = [Link.pair() for _ in RankLinks._fields]
        pid = os.fork()
        if pid == 0:
            for link in (*(link for links in ours for link in links), *(one for one, _ in pairs)):
                link.close()
            for fd in leader_fds:
                os.close(fd)
            return Rank(rank, num_ranks, store, (RankLinks(*(other for _, other in pairs)),))
        for _, other in pairs:
            other.close()
        ours.append(RankLinks(*(one for one, _ in pairs)))
        pids.append(pid)
    return Rank(0, num_ranks, store, tuple(ours), tuple(pids))


def end_with(pids: tuple[int, ...]) -> None:
    """End this process when one of its followers ends, from a thread.

    The rest of the group cannot go on. The exit status is the follower's, so that the daemon sees a
    process without memory as such.
    """
    pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids, 1)}

    def watch() -> None:
        [first, *_], _, _ = select.select(list(pidfds), [], [])
        rank = pidfds[first]
        _, status = os.waitpid(pids[rank - 1], 0)
        code = os.waitstatus_to_exitcode(status)
        _logger.error("rank %d of the group has ended (%s); the group ends", rank, _text(code))
        kill(pids)
        logging.shutdown()
        os._exit(OUT_OF_MEMORY_STATUS if code == OUT_OF_MEMORY_STATUS else 1)

    threading.Thread(target=watch, name="ranks", daemon=True).start()


def kill(pids: tuple[int, ...]) -> None:
    """Kill the followers, so that their memory is free when this process has ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def _text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
