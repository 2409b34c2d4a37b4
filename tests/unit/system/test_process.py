"""Children die with their parent."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpupoold.logs.files import MAX_TRACEBACKS
from gpupoold.system.process import as_words, importing, measure_lag, raise_oom_score

ROOT = Path(__file__).parents[3]

CHILD = "from gpupoold.system.process import die_with_parent; die_with_parent(); import time; "
CHILD += "print('safe', flush=True); time.sleep(60)"
PARENT = f"""
import subprocess, sys, os
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_child_is_killed_with_its_parent() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT, timeout=20
    )
    child_pid = int(parent.stdout)
    deadline_s = time.monotonic() + 5
    while is_running(child_pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_parent_that_is_already_gone_ends_the_child() -> None:
    script = "from gpupoold.system.process import die_with_parent; die_with_parent(1234567)"
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert child.returncode == 1
    assert b"1234567 has died" in child.stderr


def test_none_trusts_the_present_parent() -> None:
    script = f"from gpupoold.system.process import die_with_parent; die_with_parent({os.getpid()})"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_collector_rests_while_importing_and_leaves_alone_what_came() -> None:
    num_frozen = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
    finally:
        gc.unfreeze()


def test_the_collector_leaves_alone_what_was_there_and_still_finds_cycles() -> None:
    script = """
import gc, weakref
from gpupoold.system.process import settle_collector
class Node:
    pass
old = [Node() for _ in range(1000)]
settle_collector()
assert not [one for one in gc.get_objects() if isinstance(one, Node)]
node = Node()
node.itself, known = node, weakref.ref(node)
del node
kept = []
while known() is not None:
    assert len(kept) < 10**6
    kept.append([])
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_options_as_words() -> None:
    assert as_words({"--number": 3, "--kind": "sim"}) == ["--number", "3", "--kind", "sim"]


def test_file_limit_is_raised_as_far_as_it_may_be() -> None:
    script = """
import resource
from gpupoold.system.process import raise_file_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("is_first", [False, True])
def test_fault_ends_a_process_at_once_whatever_handler_was_installed(is_first: bool) -> None:
    """A handler as a library's, which does something else first, and may never be done;
    installed before faulthandler is enabled, or after."""
    install = [
        "signal.signal(signal.SIGSEGV, lambda *_: print('handled'))",
        "faulthandler.enable()",
    ]
    script = "import faulthandler, os, signal; from gpupoold.system.process import end_at_faults; "
    script += "; ".join(install if is_first else reversed(install)) + "; end_at_faults(); "
    script += "pid = os.fork(); "
    script += "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None; "
    script += "pid or os.kill(os.getpid(), signal.SIGSEGV); raise SystemExit(-code)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=20
    )
    assert done.returncode == signal.SIGSEGV, "of the child that was forked"
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "handled" not in done.stdout


def test_the_oom_score_is_raised_and_never_lowered() -> None:
    script = """
from pathlib import Path
from gpupoold.system.process import raise_oom_score
for wanted in (300, 500, 200):
    raise_oom_score(wanted)
    print(Path("/proc/self/oom_score_adj").read_text(), end="")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "300\n500\n500\n"


def test_a_score_that_cannot_be_changed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raise_oom_score(500, tmp_path / "nothing")
    assert "nothing cannot be changed: " in caplog.text


def test_a_place_in_a_child_logs_a_few_tracebacks_and_no_more() -> None:
    script = """
import logging, os
from gpupoold.system.process import begin_child
begin_child("sample", "info", os.getppid())
for number in range(100):
    try:
        raise ValueError(number)
    except ValueError:
        logging.getLogger("vllm.somewhere").exception("a client's request failed")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("Traceback") == MAX_TRACEBACKS
    assert done.stderr.count("ERROR sample vllm.somewhere: a client's request failed") == 5


async def test_what_holds_the_loop_up_is_seen() -> None:
    lags_s: list[float] = []
    measuring = asyncio.create_task(measure_lag(lags_s.append, 0.001))
    await asyncio.sleep(0)
    time.sleep(0.05)
    while not lags_s:
        await asyncio.sleep(0.001)
    measuring.cancel()
    assert lags_s[0] >= 0.04
    assert all(lag_s >= 0 for lag_s in lags_s)
