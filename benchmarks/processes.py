"""The processes of a daemon under test."""

from __future__ import annotations

import contextlib

import psutil

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.import_server import forked_for

_CHECKER = "gpupoold.frontend.grammar_checker.checker"


def processes(daemon: PrivateDaemon) -> list[psutil.Process]:
    """Return the daemon's process, first, and the lasting ones that descend from it.

    The children in which grammar checkers try one grammar each are left out.
    """
    found = descendants(daemon)
    checkers = {one.pid for one in found if module_of(one) == _CHECKER}
    lasting = [one for one in found if _parent_pid(one) not in {None, *checkers}]
    return [psutil.Process(daemon.process.pid), *lasting]


def descendants(daemon: PrivateDaemon) -> list[psutil.Process]:
    """Return the processes that descend from the daemon.

    In functional tests a fork server may be the proxy of a process elsewhere, which counts instead.
    """
    found = []
    for process in psutil.Process(daemon.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if (pid := forked_for(process.cmdline())) is not None:
                forked = psutil.Process(pid)
                found += [forked, *forked.children(recursive=True)]
            else:
                found.append(process)
    return found


def module_of(process: psutil.Process) -> str | None:
    """Return the module that ``python -m`` runs; None for other programs, or after the end.

    Raises:
        psutil.AccessDenied: the process may not be looked at.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline()).split()  # a forked process has a single argument
        return words[words.index("-m") + 1] if "-m" in words[:-1] else None
    return None


def _parent_pid(process: psutil.Process) -> int | None:
    """Return None for a process that has ended in the meantime."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid()
    return None
