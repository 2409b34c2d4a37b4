"""A process that checks grammars for a frontend, each in a forked child that may die.

The frontend forks the checker before starting threads, so the checker shares the frontend's
imports; a replacement for a dead checker starts as ``python -m``. One thread, no event loop.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import select
import signal
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from gpupoold.frontend.grammars import CHECK_TIMEOUT_S, GrammarCheck, GrammarVerdict, RunningChecker
from gpupoold.frontend.preload import preload
from gpupoold.system import process
from gpupoold.wire.channel import BlockingChannel, ChannelClosed

_logger = logging.getLogger(__name__)

_MAX_PREPARED = 8
_MAX_VERDICT_BYTES = 4096
_M_ARENA_MAX = -8
_MODULE = "gpupoold.frontend.grammar_checker.checker"


@dataclass(slots=True)
class _Trial:
    check_id: int
    pid: int
    result_fd: int
    deadline_s: float
    is_late: bool = False


class GrammarChecker:
    """Forks a child per check and reports the result."""

    def __init__(self, sock: socket.socket, log_level: str) -> None:
        self._sock = sock
        self._log_level = log_level
        self._channel: BlockingChannel[GrammarCheck] = BlockingChannel(sock, GrammarCheck)
        self._prepared: OrderedDict[int, Any] = OrderedDict()
        self._trials: dict[int, _Trial] = {}  # by the pidfd of the child
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def serve(self) -> None:
        """Check grammars until the frontend is gone. Raises ChannelClosed: the frontend is gone."""
        while True:
            first_s = min((trial.deadline_s for trial in self._trials.values()), default=None)
            wait_s = None if first_s is None else max(0.0, first_s - time.monotonic())
            for fd, _ in self._poll.poll(None if wait_s is None else wait_s * 1000 + 1):
                if fd in self._trials:
                    self._end(fd)
            now_s = time.monotonic()
            for trial in self._trials.values():
                if now_s >= trial.deadline_s:
                    trial.is_late, trial.deadline_s = True, now_s + CHECK_TIMEOUT_S
                    os.kill(trial.pid, signal.SIGKILL)
            while (check := self._channel.receive(0)) is not None:
                self._begin(check)

    def _begin(self, check: GrammarCheck) -> None:
        try:
            prepared = self._prepare(check)
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        except Exception as error:
            _logger.exception("%s: grammars of this model cannot be checked", check.model.name)
            self._channel.send(GrammarVerdict(check.check_id, "unknown", reason=str(error)[:200]))
            return
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_fd)
            os.close(write_fd)
            self._channel.send(GrammarVerdict(check.check_id, "unknown", reason=str(error)))
            return
        if pid == 0:
            self._try(prepared, check, write_fd, parent_pid)
        os.close(write_fd)
        ended_fd = os.pidfd_open(pid)
        deadline_s = time.monotonic() + CHECK_TIMEOUT_S
        self._trials[ended_fd] = _Trial(check.check_id, pid, read_fd, deadline_s)
        self._poll.register(ended_fd, select.POLLIN)

    def _prepare(self, check: GrammarCheck) -> Any:
        if check.mount_id not in self._prepared:
            with process.importing():
                preload(self._log_level)
                trial = importlib.import_module("gpupoold.frontend.grammar_checker.trial")
            self._prepared[check.mount_id] = trial.Prepared(check)
            if len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(check.mount_id)
        return self._prepared[check.mount_id]

    def _try(self, prepared: Any, check: GrammarCheck, result_fd: int, parent_pid: int) -> None:
        """Be the child; does not return."""
        try:
            process.die_with_parent(parent_pid)
            _be_first_to_go()
            process.end_at_faults()
            faulthandler.disable()  # clients would fill the log
            self._sock.close()
            trial = importlib.import_module("gpupoold.frontend.grammar_checker.trial")
            verdict = trial.try_grammar(prepared, check)
            os.write(result_fd, msgspec.msgpack.encode(verdict))
        finally:
            os._exit(0)

    def _end(self, ended_fd: int) -> None:
        trial = self._trials.pop(ended_fd)
        self._poll.unregister(ended_fd)
        os.close(ended_fd)
        _, status = os.waitpid(trial.pid, 0)
        with os.fdopen(trial.result_fd, "rb") as result:
            data = result.read(_MAX_VERDICT_BYTES)
        if trial.is_late:
            reason = f"the check did not finish within {CHECK_TIMEOUT_S:g} s"
            verdict = GrammarVerdict(trial.check_id, "unknown", reason=reason)
        elif data:
            verdict = msgspec.msgpack.decode(data, type=GrammarVerdict)
        else:
            verdict = _of_death(trial.check_id, os.waitstatus_to_exitcode(status))
        self._channel.send(verdict)


def _of_death(check_id: int, status: int) -> GrammarVerdict:
    if status == -signal.SIGKILL:  # by the kernel, out of memory, perhaps not by the grammar
        return GrammarVerdict(check_id, "unknown", reason="there is no memory for the check")
    if status == -signal.SIGXCPU:
        reason = "its compilation takes more CPU time than a request may use"
    else:
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        reason = f"its compilation ends the compiler ({name})"
    return GrammarVerdict(check_id, "refused", reason=reason)


def _be_first_to_go() -> None:
    """Let the kernel kill this process first when memory is short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def fork_checker(log_level: str) -> RunningChecker:
    """Fork a checker. Only while there is a single thread."""
    ours, theirs = socket.socketpair()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            process.show_as(_MODULE, ["--log-level", log_level])
            run(theirs, log_level, parent_pid)
            status = 0
        except Exception:
            _logger.exception("the grammar checker failed")
        finally:
            os._exit(status)
    theirs.close()
    return RunningChecker(ours, pid)


def run(sock: socket.socket, log_level: str, parent_pid: int) -> None:
    """Check grammars until the frontend is gone."""
    process.begin_child("grammar-checker", log_level, parent_pid)
    os.closerange(3, sock.fileno())  # the frontend's channel and listening socket
    os.closerange(sock.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A malloc arena per thread reserves address space, which counts towards the child's limit.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    process.lower_priority(process.GRAMMAR_NICENESS)
    with contextlib.suppress(ChannelClosed):
        GrammarChecker(sock, log_level).serve()


def main() -> None:
    """Run a checker that was started as a program."""
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--wire-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    found = parser.parse_args()
    run(socket.socket(fileno=found.wire_fd), found.log_level, found.parent_pid)


if __name__ == "__main__":
    main()
