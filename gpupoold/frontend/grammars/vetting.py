"""Cached verdicts on grammars; the grammar checker decides on new ones.

A frontend has one object for all models. Equal grammars share one check; few checks run at a time,
and callers take turns, so that a caller with many new grammars delays only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from gpupoold.frontend.grammars.messages import CHECK_TIMEOUT_S, GrammarCheck, GrammarVerdict
from gpupoold.system.process import as_words
from gpupoold.wire.channel import AsyncChannel, ChannelClosed
from gpupoold.wire.messages import LoadedModel, ModelToLoad

_logger = logging.getLogger(__name__)

MAX_RUNNING = 2
"""Checks at a time."""
MAX_WAITING = 64
"""Limit of waiting checks of all callers."""
MAX_WAITING_PER_CALLER = 16
MAX_CACHED = 4_096
"""Verdicts; each takes some 100 bytes."""
ANSWER_TIMEOUT_S = CHECK_TIMEOUT_S + 5.0
"""Seconds after which a check without an answer is given up."""
START_TIMEOUT_S = 2 * ANSWER_TIMEOUT_S
"""Seconds until a new checker must have answered; it imports vLLM first."""
_RESTART_WAIT_S = 1.0


class RunningChecker(NamedTuple):
    """A checker's process, and this process's end of the channel."""

    sock: socket.socket
    pid: int
    is_forked: bool = True
    """True if the process must be waited for."""


class TooManyGrammars(Exception):
    """More grammars than may wait have not been checked yet."""


@dataclass(eq=False, slots=True)
class _Job:
    check: GrammarCheck
    verdict: asyncio.Future[GrammarVerdict]


@dataclass(eq=False, slots=True)
class CheckQueue:
    """Waiting checks: callers take turns, each with its oldest check."""

    _by_caller: OrderedDict[str, deque[_Job]] = field(default_factory=OrderedDict)
    _num_waiting: int = 0

    def put(self, caller: str, job: _Job) -> None:
        """Add a check.

        Raises:
            TooManyGrammars: too many wait already.
        """
        jobs = self._by_caller.setdefault(caller, deque())
        if self._num_waiting >= MAX_WAITING or len(jobs) >= MAX_WAITING_PER_CALLER:
            if not jobs:
                del self._by_caller[caller]
            raise TooManyGrammars
        jobs.append(job)
        self._num_waiting += 1

    def take(self) -> _Job | None:
        """The next check; None: none waits."""
        if not self._by_caller:
            return None
        caller, jobs = self._by_caller.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._by_caller[caller] = jobs  # at the end: other callers come first
        self._num_waiting -= 1
        return job


class GrammarVetting:
    """Decides on grammars; for the event loop.

    ``checker`` is a running child process; None starts a checker on first use.
    """

    def __init__(self, log_level: str, checker: RunningChecker | None = None) -> None:
        self._log_level = log_level
        self._first = checker
        self._present: RunningChecker | None = None
        self._has_answered = False
        self._channel: AsyncChannel[GrammarVerdict] | None = None
        self._starting = asyncio.Lock()
        self._started_s = float("-inf")
        self._known: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._convictions: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Future[GrammarVerdict]] = {}
        self._queue = CheckQueue()
        self._running: dict[int, _Job] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def verdict(
        self, mount_id: int, model: ModelToLoad, loaded: LoadedModel, constraint: bytes, caller: str
    ) -> GrammarVerdict:
        """Return the verdict on a grammar, after a check if new.

        Raises:
            TooManyGrammars: too many checks are waiting.
        """
        key = hashlib.sha256(b"%d %b" % (mount_id, constraint)).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        shared = self._under_way.get(key)
        if shared is None:
            check = GrammarCheck(next(self._ids), mount_id, model, loaded, constraint)
            shared = asyncio.get_running_loop().create_future()
            self._queue.put(caller, _Job(check, shared))
            self._under_way[key] = shared
            shared.add_done_callback(lambda done: self._learn(key, done))
            self._advance()
        # The check continues for other requests when this request's client leaves.
        return await asyncio.shield(shared)

    def convict(self, model: str, key_id: str, grammar: str, reason: str) -> None:
        """Remember that a grammar, named by its digest, has exceeded a bound in a worker.

        The grammar is refused for the API key only: another key's answers may be short.
        """
        self._convictions[model, key_id, grammar] = reason
        if len(self._convictions) > MAX_CACHED:
            self._convictions.popitem(last=False)

    @property
    def has_convictions(self) -> bool:
        """True if :meth:`conviction` may return a reason."""
        return bool(self._convictions)

    def conviction(self, model: str, key_id: str, grammar: str) -> str:
        """Return why a grammar is refused, or an empty text."""
        return self._convictions.get((model, key_id, grammar), "")

    def _learn(self, key: bytes, done: asyncio.Future[GrammarVerdict]) -> None:
        del self._under_way[key]
        verdict = done.result()
        if verdict.outcome == "unknown":
            return
        self._known[key] = verdict
        if len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)

    def _advance(self) -> None:
        while len(self._running) < MAX_RUNNING:
            job = self._queue.take()
            if job is None:
                return
            self._running[job.check.check_id] = job
            self._keep(self._ask(job))

    async def _ask(self, job: _Job) -> None:
        try:
            async with self._starting:
                if self._channel is None:
                    self._channel = await self._connected()
                    self._keep(self._read(self._channel))
            self._channel.send(job.check)
            loop = asyncio.get_running_loop()
            loop.call_later(ANSWER_TIMEOUT_S, self._give_up, self._channel, job.check.check_id)
        except (OSError, ValueError) as error:
            _logger.error("the grammar checker cannot be asked: %s", error)
            self._settle(GrammarVerdict(job.check.check_id, "unknown"))

    def _give_up(self, channel: AsyncChannel[GrammarVerdict], check_id: int) -> None:
        """Answer a check that the checker has not answered in time; kill a hung checker."""
        if check_id not in self._running:
            return
        has_started = self._has_answered or time.monotonic() > self._started_s + START_TIMEOUT_S
        if channel is self._channel and has_started and self._present is not None:
            pid = self._present.pid
            _logger.error("the grammar checker (process %d) does not answer", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reason = f"the checker has not answered within {ANSWER_TIMEOUT_S:g} s"
        self._settle(GrammarVerdict(check_id, "unknown", reason=reason))

    async def _connected(self) -> AsyncChannel[GrammarVerdict]:
        checker, self._first = self._first, None
        if checker is None:
            await asyncio.sleep(self._started_s + _RESTART_WAIT_S - time.monotonic())
            checker = await self._start()
        self._started_s, self._has_answered, self._present = time.monotonic(), False, checker
        return AsyncChannel(checker.sock, GrammarVerdict)

    async def _start(self) -> RunningChecker:
        ours, theirs = socket.socketpair()
        with theirs:
            options = {
                "--wire-fd": theirs.fileno(),
                "--parent-pid": os.getpid(),
                "--log-level": self._log_level,
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gpupoold.frontend.grammar_checker.checker",
                *as_words(options),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._keep(process.wait())
        _logger.warning("the grammar checker has been started as process %d", process.pid)
        return RunningChecker(ours, process.pid, is_forked=False)

    async def _read(self, channel: AsyncChannel[GrammarVerdict]) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                verdict = await channel.receive()
                self._has_answered = True
                self._settle(verdict)
        channel.close()
        self._channel = None
        if self._present is not None and self._present.is_forked:
            self._keep(asyncio.to_thread(os.waitpid, self._present.pid, 0))
        _logger.error("the grammar checker has died")
        for check_id in list(self._running):
            self._settle(GrammarVerdict(check_id, "unknown"))

    def _settle(self, verdict: GrammarVerdict) -> None:
        job = self._running.pop(verdict.check_id, None)
        if job is not None:
            job.verdict.set_result(verdict)
        self._advance()

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
