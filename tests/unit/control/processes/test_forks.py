"""Modules started by a fork server: real processes, forked by a real one."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import ANSWER_TIMEOUT_S, ForkedProcess, ForkServer, Launch
from tests.unit.descriptors import open_descriptors, opened_since

TIMEOUT_S = 20
SAMPLE = """
import json, os, socket, sys, time
import forked_preload

def main():
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    sock = socket.socket(fileno=int(arguments["--wire-fd"]))
    told = {
        "argv": sys.argv,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "word": os.environ.get("WORD"),
        "server_word": os.environ.get("SERVER_WORD"),
        "preloaded_by": forked_preload.loaded_by,
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    }
    sock.sendall(json.dumps(told).encode())
    print("to the log")
    match arguments["--end"]:
        case "status":
            sys.exit(3)
        case "error":
            raise RuntimeError("on purpose")
        case "wait":
            time.sleep(60)
"""
PRELOAD = """
import os
loaded_by = 0

def preload(log_level):
    global loaded_by
    loaded_by = os.getpid()
    import forked_sample.__main__
    if os.environ.get("FAILING_PIDFDS"):
        failing_pidfds(int(os.environ["FAILING_PIDFDS"]))
    if user_id := os.environ.get("USER_ID"):
        import resource
        os.setuid(int(user_id))
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))  # this process and one child

def failing_pidfds(count):
    import errno
    opened, errors = os.pidfd_open, iter([errno.EMFILE, errno.ENOMEM] * count)

    def pidfd_open(pid):
        # All but the first, until there are no more errors.
        if pidfd_open.calls and (error := next(errors, 0)):
            raise OSError(error, os.strerror(error))
        pidfd_open.calls += 1
        return opened(pid)

    pidfd_open.calls = 0
    os.pidfd_open = pidfd_open
"""


class Rig:
    """A fork server for a module of the test's, and a socket to each process."""

    def __init__(self, folder: Path, settings: Settings, preloaded: Sequence[str]) -> None:
        self.server = ForkServer(settings, {"SERVER_WORD": "before"}, preloaded)
        self.log = folder / "sample.log"
        self.log_dir = settings.paths.log_dir

    async def start(self, end: str, module: str = "forked_sample") -> tuple[ForkedProcess, Any]:
        """A process that ends so, and what it tells of itself."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self.log.open("ab") as log:
            options = {"--wire-fd": theirs.fileno()}
            arguments = ["--end", end]
            launch = Launch(module, arguments, log.fileno(), options, {"WORD": "hello"})
            process = await asyncio.wait_for(self.server.fork(launch), TIMEOUT_S)
            theirs.close()
            ours.settimeout(TIMEOUT_S)
            told = await asyncio.to_thread(ours.recv, 1 << 16)
        return process, json.loads(told) if told else None


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    package = tmp_path / "modules" / "forked_sample"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SAMPLE)
    (package.parent / "forked_preload.py").write_text(PRELOAD)
    monkeypatch.syspath_prepend(package.parent)
    paths: dict[str, object] = {"model_dirs": []}
    for name in ("state", "runtime", "log", "download"):
        paths[f"{name}_dir"] = tmp_path / name
    settings = Settings.model_validate({"paths": paths, "device": [{"kind": "emulated"}]})
    settings.paths.log_dir.mkdir()
    made = Rig(tmp_path, settings, ("no_such_module", "forked_preload"))
    yield made
    await made.server.stop()


async def status_of(process: ForkedProcess) -> int:
    return await asyncio.wait_for(process.wait(), TIMEOUT_S)


async def test_a_module_has_what_it_was_given(rig: Rig) -> None:
    process, told = await rig.start("status")
    fd, parent = told["argv"][4], told["argv"][6]
    assert told["argv"] == [
        *("forked_sample", "--end", "status", "--wire-fd", fd, "--parent-pid", parent)
    ]
    assert told["pid"] == process.pid
    assert told["parent"] == told["preloaded_by"] == int(parent) != os.getpid()
    assert (told["word"], told["server_word"]) == ("hello", "before")
    # Its standard streams, what it was given, and the folder that it lists.
    assert {0, 1, 2, int(fd)} < set(told["fds"])
    assert len(told["fds"]) == 5
    assert await status_of(process) == 3
    assert rig.log.read_text() == "to the log\n"


async def test_several_at_a_time(rig: Rig) -> None:
    started = await asyncio.gather(*(rig.start("wait") for _ in range(4)))
    fds = [len(told["fds"]) for _, told in started]
    assert fds == [fds[0]] * 4, "one has descriptors of another"
    processes = [process for process, _ in started]
    for process in processes:
        process.kill()
        process.kill()
    assert [await status_of(process) for process in processes] == [-signal.SIGKILL] * 4
    processes[0].kill()
    assert not any(psutil.pid_exists(process.pid) for process in processes), "they were reaped"


async def test_an_error_is_in_the_log(rig: Rig) -> None:
    process, _ = await rig.start("error")
    assert await status_of(process) == 1
    assert "RuntimeError: on purpose" in rig.log.read_text()


async def test_no_such_module(rig: Rig) -> None:
    process, told = await rig.start("status", "no_module_of_this_name")
    assert told is None
    assert await status_of(process) == 1
    assert "No module named 'no_module_of_this_name'" in rig.log.read_text()


async def test_what_cannot_be_preloaded_is_left_to_who_wants_it(rig: Rig) -> None:
    process, _ = await rig.start("status")
    await status_of(process)
    assert "no_such_module could not be imported" in (rig.log_dir / "fork-server.log").read_text()


async def test_all_die_with_the_server_and_the_next_has_another(rig: Rig) -> None:
    first, told = await rig.start("wait")
    os.kill(told["parent"], signal.SIGKILL)
    assert await status_of(first) == -signal.SIGKILL
    async with asyncio.timeout(TIMEOUT_S):
        while psutil.pid_exists(first.pid):
            await asyncio.sleep(0.01)
    second, told_later = await rig.start("status")
    assert told_later["parent"] != told["parent"]
    assert await status_of(second) == 3


async def test_stopping_ends_all(rig: Rig) -> None:
    process, told = await rig.start("wait")
    await rig.server.stop()
    assert await status_of(process) == -signal.SIGKILL
    assert not psutil.pid_exists(told["parent"])


async def test_a_server_that_does_not_answer_is_replaced(rig: Rig) -> None:
    first, told = await rig.start("wait")
    os.kill(told["parent"], signal.SIGSTOP)
    rig.server.answer_timeout_s = 0.2
    with pytest.raises(OSError, match=r"did not answer within 0\.2 s and is killed"):
        await rig.start("wait")
    rig.server.answer_timeout_s = ANSWER_TIMEOUT_S
    assert await status_of(first) == -signal.SIGKILL
    second, told_later = await rig.start("status")
    assert told_later["parent"] != told["parent"]
    assert await status_of(second) == 3


@pytest.fixture
def restored_limit() -> Iterator[tuple[int, int]]:
    """This process's limit of open files, as it was before, also after the test."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def assert_server_goes_on(rig: Rig, first: ForkedProcess, server_pid: int) -> None:
    """The fork server and what it forked before live, and nothing else; it forks again."""
    [child] = psutil.Process(server_pid).children()
    assert child.pid == first.pid
    assert child.status() != psutil.STATUS_ZOMBIE
    second, told = await rig.start("status")
    assert told["parent"] == server_pid
    assert await status_of(second) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="the limit is that of another user's processes")
async def test_no_process_may_be_made(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_ID", "54321")  # root may have as many processes as it wants
    first, told = await rig.start("wait")
    for _ in range(2):
        with pytest.raises(OSError, match=r"could not fork: .*Resource temporarily unavailable"):
            await rig.start("status")
    assert [child.pid for child in psutil.Process(told["parent"]).children()] == [first.pid]
    first.kill()
    assert await status_of(first) == -signal.SIGKILL
    second, told_later = await rig.start("status")
    assert told_later["parent"] == told["parent"]
    assert await status_of(second) == 3


@pytest.mark.parametrize("num_more", [0, 1, 2])
async def test_no_file_may_be_opened_by_the_server(rig: Rig, num_more: int) -> None:
    """Neither what it is sent, nor, with one more than that, a pidfd."""
    first, told = await rig.start("wait")
    server_pid = told["parent"]
    limits = resource.prlimit(server_pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{server_pid}/fd")}
    free = [number for number in range(len(used) + 3) if number not in used]
    resource.prlimit(server_pid, resource.RLIMIT_NOFILE, (free[num_more], limits[1]))
    if num_more < 2:
        with pytest.raises(OSError, match=r"could not fork: .*descriptors of a message were lost"):
            await rig.start("status")
    else:
        process, _ = await rig.start("status")  # the descriptors are closed before the pidfd
        await status_of(process)
    assert {int(name) for name in os.listdir(f"/proc/{server_pid}/fd")} == used
    resource.prlimit(server_pid, resource.RLIMIT_NOFILE, limits)
    await assert_server_goes_on(rig, first, server_pid)


async def test_a_process_that_cannot_be_watched_does_not_stay(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING_PIDFDS", "1")
    first, told = await rig.start("wait")
    for reason in ("Too many open files", "Cannot allocate memory"):
        with pytest.raises(OSError, match=f"could not fork: .*{reason}"):
            await rig.start("wait")
    await assert_server_goes_on(rig, first, told["parent"])


async def test_no_file_may_be_opened_here(rig: Rig, restored_limit: tuple[int, int]) -> None:
    """The process that was forked meanwhile is ended: its pidfd got lost."""
    first, told = await rig.start("wait")
    before = open_descriptors()
    os.kill(told["parent"], signal.SIGSTOP)
    waiting = asyncio.create_task(rig.start("wait"))
    for _ in range(100):
        await asyncio.sleep(0)  # until it waits for the answer
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, restored_limit[1]))
    os.kill(told["parent"], signal.SIGCONT)
    with pytest.raises(OSError, match=r"could not fork: .*descriptors of a message were lost"):
        await waiting
    resource.setrlimit(resource.RLIMIT_NOFILE, restored_limit)
    async with asyncio.timeout(TIMEOUT_S):
        while len(psutil.Process(told["parent"]).children()) > 1:
            await asyncio.sleep(0.01)
    assert not opened_since(before)
    await assert_server_goes_on(rig, first, told["parent"])
