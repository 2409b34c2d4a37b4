"""Lets the k-th system call of a kind fail, for all k, and looks at what is left of an action.

Runs in a process that has ``shim.c`` preloaded (:func:`run_tables` starts one).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import PYTHON_PATH, ROOT

KINDS = (
    "write",
    "fsync",
    "rename",
    "memfd_create",
    "fork",
    "pidfd_open",
    "truncate",
    "mmap",
    "socketpair",
    "open",
    "dup",
    "mkdir",
    "socket",
)
SHORT = 0  # a write that takes half of what it is given
_ERRORS = {
    "write": (errno.ENOSPC, errno.EIO, SHORT),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.ENOSPC, errno.EIO),
    "memfd_create": (errno.EMFILE, errno.ENOMEM),
    "fork": (errno.EAGAIN, errno.ENOMEM),
    "pidfd_open": (errno.EMFILE, errno.ENOMEM),
    "truncate": (errno.ENOSPC, errno.EIO, errno.ENOMEM),
    "mmap": (errno.ENOMEM,),
    "socketpair": (errno.EMFILE, errno.ENOMEM),
    "open": (errno.EMFILE, errno.EIO, errno.ENOSPC),
    "dup": (errno.EMFILE,),
    "mkdir": (errno.ENOSPC, errno.EIO),
    "socket": (errno.EMFILE, errno.ENOMEM),
}
# The disk stays full, and the process has no descriptors left, until somebody sees to it.
_LASTING = frozenset({errno.ENOSPC, errno.EMFILE})


@dataclass(frozen=True, slots=True)
class Fault:
    """The ``call``-th call of ``kind`` fails with ``error`` (and those after it: lasting)."""

    kind: str
    call: int
    error: int

    def __str__(self) -> str:
        name = errno.errorcode.get(self.error, "a short write")
        return f"{self.kind} {self.call}: {name}"


class Scenario(ABC):
    """An action that changes something that can be looked at.

    A new object is made for each run, in a new ``folder``.
    """

    errors: tuple[type[BaseException], ...] = ()
    """What the action may raise."""

    is_best_effort = False
    """Whether the action may end without an error, and with parts of the state as before."""

    uncounted: frozenset[str] = frozenset()
    """Open files that come and go by themselves, see ``open_files``."""

    unsteady: frozenset[str] = frozenset()
    """Kinds of calls that differ in number from run to run, and are not failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def prepare(self) -> None:  # noqa: B027  (most have nothing to prepare, or to close)
        """What comes before the action."""

    @abstractmethod
    async def act(self) -> None:
        """The action; done again, it does what is not done yet."""

    @abstractmethod
    async def state(self) -> Any:
        """What there is now, comparable between runs."""

    async def close(self) -> None:  # noqa: B027
        """Release what ``prepare`` made."""


class Shim:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def start(self, fault: Fault | None, folder: Path) -> None:
        """Count calls from now on; ``fault`` happens."""
        kind, call, error = (
            (-1, 0, 0) if fault is None else (KINDS.index(fault.kind), fault.call, fault.error)
        )
        self._library.faults_start(kind, call, error, error in _LASTING, os.fsencode(folder))

    def stop(self) -> int:
        """Nothing fails any more; how often something did."""
        self._library.faults_stop()
        return int(self._library.faults_failed())

    def counts(self) -> dict[str, int]:
        """Calls since the start, by kind."""
        return {name: self._library.faults_count(index) for index, name in enumerate(KINDS)}


async def run_all(kind: type[Scenario], *, is_whole: bool) -> dict[str, Any]:
    """Let every call fail that the action makes when all is well; what was wrong afterwards.

    Each with one error, or with every one that it can have: ``is_whole``.
    """
    shim = Shim()
    with tempfile.TemporaryDirectory(prefix="gpupool-faults-") as name:
        folder = Path(name)
        (folder / "warm").mkdir()
        (folder / "clean").mkdir()
        await _run(shim, kind(folder / "warm"), None)
        gc.freeze()  # what is imported by now is not walked after every fault
        clean = await _run(shim, kind(folder / "clean"), None)
        problems, num_faults, num_unmet = list(clean.problems), 0, 0
        steady = {name: n for name, n in clean.counts.items() if name not in kind.unsteady}
        for number, fault in enumerate(_faults(steady, is_whole=is_whole)):
            place = folder / str(number)
            place.mkdir()
            run = await _run(shim, kind(place), fault, clean)
            problems += [f"{fault}: {problem}" for problem in run.problems]
            num_faults += 1
            num_unmet += not run.num_failed
    counts = {name: count for name, count in clean.counts.items() if count}
    return {"counts": counts, "faults": num_faults, "unmet": num_unmet, "problems": problems}


def _faults(counts: dict[str, int], *, is_whole: bool) -> list[Fault]:
    found = [
        [Fault(kind, call, error) for error in _ERRORS[kind]]
        for kind, count in counts.items()
        for call in range(1, count + 1)
    ]
    if is_whole:
        return [fault for faults in found for fault in faults]
    return [faults[number % len(faults)] for number, faults in enumerate(found)]


@dataclass
class _Run:
    done: Any
    counts: dict[str, int]
    open_files: Counter[str]
    num_failed: int
    problems: list[str]


async def _run(shim: Shim, scenario: Scenario, fault: Fault | None, clean: Any = None) -> _Run:
    problems: list[str] = []
    await scenario.prepare()
    before, files_before = await scenario.state(), await _settled_files()
    error: BaseException | None = None
    shim.start(fault, scenario.folder)
    try:
        async with asyncio.timeout(60):
            await scenario.act()
    except scenario.errors as caught:
        error = caught
    except Exception as caught:
        error = caught
        problems.append(f"raised {caught!r}")
    num_failed = shim.stop()
    counts = shim.counts()
    after = await scenario.state()
    if clean is not None:
        problems += _judged(before, after, clean.done, error, is_loose=scenario.is_best_effort)
        error = None
        if after != clean.done:
            try:
                await scenario.act()
            except Exception as caught:
                problems.append(f"a later try raised {caught!r}")
        after = await scenario.state()
        if after != clean.done:
            problems.append(f"after a later try there is {after!r}")
    elif error is not None:
        problems.append(f"without a fault: {error!r}")
    left = await _settled_files()
    left.subtract(files_before)
    left = Counter({name: n for name, n in left.items() if n and name not in scenario.uncounted})
    if clean is not None and left != clean.open_files:
        problems.append(f"open files more or less: {left}, without a fault {clean.open_files}")
    await scenario.close()
    return _Run(after, counts, left, num_failed, problems)


def _judged(
    before: Any, after: Any, done: Any, error: BaseException | None, *, is_loose: bool
) -> Iterator[str]:
    if is_loose and isinstance(done, tuple):
        parts = zip(before, after, done, strict=True)
        if not all(now in (old, new) for old, now, new in parts):
            yield f"left {after!r}"
    elif error is None and not is_loose and after != done:
        yield f"ended without an error and left {after!r}"
    elif after not in (before, done):
        yield f"left {after!r} after {error!r}"


async def _settled_files() -> Counter[str]:
    """``open_files`` once they stay the same: threads and collected objects end a little later."""
    gc.collect()
    found = open_files()
    for _ in range(100):
        await asyncio.sleep(0.005)
        before, found = found, open_files()
        if found == before:
            break
    return found


def open_files() -> Counter[str]:
    """This process's descriptors by what they lead to."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # that of the listing
        found[target.split(":")[0] if ":[" in target else Path(target).name] += 1
    return found


def build_shim(folder: Path) -> Path:
    """The compiled library; raises FileNotFoundError where there is no compiler."""
    target = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", target, source, "-ldl"],
        check=True,
        timeout=60,
    )
    return target


def run_tables(shim: Path, *, is_whole: bool, timeout_s: float) -> dict[str, dict[str, Any]]:
    """The results of :func:`run_all` by scenario, from a process of its own."""
    environment = os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        [sys.executable, "-m", "tests.syscall_faults", str(int(is_whole))],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results
