"""Children die with their parent."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

from gpupoold.process import as_words, importing

ROOT = Path(__file__).parents[2]

CHILD = "from gpupoold.process import die_with_parent; die_with_parent(); import time; "
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
    script = "from gpupoold.process import die_with_parent; die_with_parent(1234567)"
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert child.returncode == 1
    assert b"1234567 is gone" in child.stderr


def test_none_trusts_the_present_parent() -> None:
    script = f"from gpupoold.process import die_with_parent; die_with_parent({os.getpid()})"
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
from gpupoold.process import settle_collector
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
from gpupoold.process import raise_file_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
