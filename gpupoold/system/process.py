"""Start-up and settings of the processes of the daemon, and the lag of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gpupoold.logs.files import LogLimit
from gpupoold.units import LineFormatter

OUT_OF_MEMORY_STATUS = 71  # exit status of a worker without memory of the host, or without pages
OUT_OF_DEVICE_MEMORY_STATUS = 72  # of a worker whose GPU has no memory left outside the pages

# The OOM killer ranks processes by memory use plus this value, in thousandths of the machine's
# memory. A worker's death costs a pause, a frontend's death the connections, the daemon's death
# everything, and the fork server's death ends all forked processes.
WORKER_OOM_SCORE_ADJ = 500
FRONTEND_OOM_SCORE_ADJ = 200

# Priorities on a machine with few cores: the daemon and the frontends come first, then emulated
# devices, then grammars, whose cost is chosen by clients.
EMULATED_DEVICE_NICENESS = 3
GRAMMAR_NICENESS = 10
LONG_GRAMMAR_NICENESS = 19
_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
_PR_SET_PDEATHSIG = 1
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
# Thresholds of the daemon's garbage collector: new objects before a collection of generation 0,
# such collections before generation 1, and collections of generation 1 before generation 2.
_THRESHOLDS = (4_000, 25, 200)
# How long a thread of a child waits for the GIL while another thread runs Python code: a copying
# thread between two pieces, an event loop beside threads that make answers. Copies in pieces of
# 1 MiB, 6.0 GB/s alone, then reach 0.2 GB/s with the default of 5 ms, 1.3 GB/s with 0.5 ms and
# 2.5 GB/s with 0.1 ms. The other thread was equally fast with each value.
_SWITCH_INTERVAL_S = 0.0001

_INTERVAL_S = 0.1


def begin_child(name: str, log_level: str, parent_pid: int | None = None) -> None:
    """Prepare a child: end with the daemon, ignore the terminal's signals, log to standard error.

    Log lines carry ``name``.

    Raises:
        OSError, SystemExit: see :func:`die_with_parent`.
    """
    die_with_parent(parent_pid)
    # A terminal's Ctrl-C and hang-up reach the whole process group; only the daemon reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LogLimit())
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s"))
    # Forced: a forked process has the handler of the fork server.
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    faulthandler.enable()  # a crash writes the stacks of all threads to the log
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def raise_oom_score(oom_score_adj: int, path: Path = _OOM_SCORE_ADJ) -> None:
    """Raise the kernel's preference for killing this process when memory runs out.

    A higher score stays. Raising the score needs no privilege.
    """
    try:
        if int(path.read_text()) < oom_score_adj:
            path.write_text(str(oom_score_adj))
    except OSError as error:  # such as a read-only /proc
        logging.getLogger(__name__).warning("%s cannot be changed: %s", path, error)


def show_as(module: str, arguments: Sequence[str]) -> None:
    """Set the name of this forked process in ``ps`` to ``python -m MODULE``."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(" ".join([sys.executable, "-m", module, *arguments]))


def limit_use(cpu_s: float, memory_bytes: int) -> None:
    """Limit this process to further CPU seconds and bytes of address space; it dumps no core.

    Beyond the CPU time the kernel ends the process with SIGXCPU, beyond the memory allocations
    fail.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as statm:
        num_pages = int(statm.read().split()[0])
    most_bytes = num_pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def lower_priority(niceness: int) -> None:
    """Lower the scheduling priority of the calling thread and its future threads."""
    with contextlib.suppress(OSError):  # a container may forbid the call
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def lower_priority_of(pid: int, niceness: int) -> None:
    """Lower the scheduling priority of all threads of a process."""
    with contextlib.suppress(OSError):  # a container may forbid the call, or the process has ended
        for thread_id in map(int, os.listdir(f"/proc/{pid}/task")):
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)


def trim_heap() -> None:
    """Return unused pages of the C library's heap to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)


def set_log_level(log_level: str) -> None:
    logging.getLogger().setLevel(log_level.upper())


def die_with_parent(expected_parent_pid: int | None = None) -> None:
    """Make the kernel kill this process when the parent's spawning thread ends.

    To be called first in a child. If ``expected_parent_pid`` is not the present parent, the real
    parent died between the fork and this call, and no signal would arrive. None skips this check.

    Raises:
        OSError: the kernel refused the request.
        SystemExit: the expected parent has died.
    """
    parent_pid = os.getppid() if expected_parent_pid is None else expected_parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} has died")


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit.

    The usual soft limit of 1,024 serves programs that use ``select``.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def as_words(options: Mapping[str, object]) -> list[str]:
    """Return options and values as words of a command line."""
    return [str(word) for option in options.items() for word in option]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Exclude the objects created in this context from garbage collection.

    Importing vLLM creates about a million permanent objects. The collector walks the objects
    neither during the import, which saves a seventh of its time, nor later during a stream.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_at_faults() -> None:
    """Make a fault such as SIGSEGV end this process at once, with a Python traceback on stderr.

    To be called in the main thread after the import of vLLM; forked children inherit the setting.
    vLLM imports a library (``tvm_ffi``) that installs a SIGSEGV handler to resolve line numbers of
    the native stack. The handler delays the end by seconds and allocates memory, which may hang
    after a fault.
    """
    # faulthandler passes a signal on to the handler found when enabled, and puts that handler back
    # when disabled.
    faulthandler.disable()
    for number in _FAULTS:
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()


def settle_collector() -> None:
    """Freeze startup objects and raise the garbage collector's thresholds.

    Startup objects are permanent, and later objects rarely form cycles. A collection over the
    daemon's modules and routes stopped the event loop for 50 ms, one over the requests, turns and
    events of a busy machine for 30 ms, several times a minute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def measure_lag(add: Callable[[float], None], interval_s: float = _INTERVAL_S) -> None:
    """Call ``add`` every ``interval_s`` with the event loop's lag in seconds; never returns."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        add(max(0.0, loop.time() - due_s))
