"""Clients of both sockets that say nothing, or do not read: others are served as before."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from benchmarks.private_daemon import PrivateDaemon
from tests.functional.daemon_tools import child

NUM_IDLE = 3000
NUM_OWN = 100
NUM_STRANGERS = 300
STRANGER = 4_000_000
# Far more than the kernel keeps for a client that does not read.
NUM_UNREAD = 1000
MAX_GROWTH_BYTES = 64 << 20

CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
connections = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for one in connections:
    one.connect("admin.sock")
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def daemon(sim_box: PrivateDaemon) -> Iterator[PrivateDaemon]:
    """A daemon, and open files for all connections of the tests."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2 * NUM_IDLE:
        pytest.skip(f"needs {2 * NUM_IDLE} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    yield sim_box
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


def frontend(daemon: PrivateDaemon) -> psutil.Process:
    return child(daemon, "frontend")


def assert_serves(daemon: PrivateDaemon) -> None:
    """A completion, and a call of the admin API."""
    asked = {"model": "one", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{daemon.http_url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    with daemon.client() as client:
        assert client.status().state == "ready"


@contextlib.contextmanager
def connected(make: Sequence[object], count: int) -> Iterator[list[socket.socket]]:
    """Connections of this process to an address."""
    family, address = make
    assert isinstance(family, int)
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.settimeout(60)
            one.connect(address)  # type: ignore[arg-type]
            opened.append(one)
        yield opened


def public(daemon: PrivateDaemon) -> Sequence[object]:
    parts = urlsplit(daemon.http_url)
    return socket.AF_INET, (parts.hostname, parts.port)


def test_thousands_of_idle_connections(daemon: PrivateDaemon) -> None:
    pid = frontend(daemon).pid
    admin = (socket.AF_UNIX, str(daemon.socket_path))
    with connected(public(daemon), NUM_IDLE), connected(admin, NUM_OWN):
        assert_serves(daemon)
        assert psutil.Process(pid).num_fds() > NUM_IDLE
    assert frontend(daemon).pid == pid
    assert_serves(daemon)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_strangers_at_the_admin_socket_take_no_descriptors(daemon: PrivateDaemon) -> None:
    folder = daemon.socket_path.parent
    process = psutil.Process(daemon.process.pid)
    before = process.num_fds()
    daemon.socket_path.chmod(0o666)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            somebody = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-ISc", CONNECT, str(STRANGER), str(NUM_STRANGERS)],
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            assert somebody.stdout is not None
            assert somebody.stdin is not None
            stack.callback(somebody.stdin.close)
            assert somebody.stdout.readline() == b"connected\n"
            assert_serves(daemon)
            # 128 of one user at a time; and some of the daemon's own.
            assert process.num_fds() < before + 200
    daemon.socket_path.chmod(0o660)
    assert_serves(daemon)


@pytest.mark.parametrize("where", ["public", "admin"])
def test_answers_that_are_not_read_take_little_memory(daemon: PrivateDaemon, where: str) -> None:
    if where == "public":
        process, target, path = frontend(daemon), public(daemon), b"/openapi.json"
    else:
        process = psutil.Process(daemon.process.pid)
        target, path = (socket.AF_UNIX, str(daemon.socket_path)), b"/config"
    asked = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path
    with connected(target, 1) as [reader]:
        reader.sendall(asked)  # the first answer may be made for all that come after
        assert reader.recv(1 << 10).startswith(b"HTTP/1.1 200 ")
    before_bytes = process.memory_info().rss
    with connected(target, 20) as deaf:
        for one in deaf:
            one.settimeout(0.2)
            with contextlib.suppress(TimeoutError):  # as no more of them is read either
                one.sendall(asked * NUM_UNREAD)
        assert_serves(daemon)
        assert process.memory_info().rss < before_bytes + MAX_GROWTH_BYTES
    assert_serves(daemon)


def test_daemon_may_have_as_many_files_as_the_system_allows(daemon: PrivateDaemon) -> None:
    for process in (psutil.Process(daemon.process.pid), frontend(daemon)):
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        _, _, _, soft, hard, _ = line.split()
        assert soft == hard
