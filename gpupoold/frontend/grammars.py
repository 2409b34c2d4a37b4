"""Bounds on the grammars of requests, and cached verdicts of the grammar checker.

The bounds are checked in time linear in the text and without recursion, so that the event loop can
check them; no grammar library is called here.

A frontend has one ``GrammarVetting`` for all models. Equal grammars share one check; few checks run
at a time, and callers take turns, so that a caller with many new grammars delays only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from gpupoold.system.process import as_words
from gpupoold.wire.channel import AsyncChannel, ChannelClosed
from gpupoold.wire.messages import LoadedModel, ModelToLoad
from gpupoold.wire.records import Message

Outcome = Literal["accepted", "refused", "unknown"]
CHECK_TIMEOUT_S = 60.0
"""Limit of a check by the clock, for a child that waits for a core; the limit of CPU time is
lower.
"""

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

MAX_BYTES = 256 << 10
"""Limit of one field's text in bytes."""
MAX_VALUES = 20_000
"""Limit of JSON values in one field, counted at all levels."""
MAX_PROPERTIES = 5_000
"""Limit of entries of all ``properties`` and ``patternProperties`` in one field."""
MAX_DEPTH = 80
"""Limit of JSON levels. vLLM accepts 64 in a schema, and 16 more around it in a structural tag."""
MAX_PATTERN_CHARS = 8_192
MAX_PATTERN_DEPTH = 64
"""Limit of group levels in one regular expression."""
MAX_CHOICES = 10_000
MAX_TOOLS = 512
MAX_EBNF_BYTES = 64 << 10

# Keys whose string value is a regular expression, in schemas and structural tags.
_PATTERN_KEYS = frozenset({"pattern", "regex", "whitespace_pattern"})
_EBNF_KEYS = frozenset({"grammar", "ebnf"})
_PROPERTY_KEYS = frozenset({"properties", "patternProperties"})
_CHECKED_KEYS = _PATTERN_KEYS | _EBNF_KEYS | _PROPERTY_KEYS
_NESTED_JSON_KEYS = ("json", "structural_tag")
# vLLM's grammar for tools repeats parts of the tools' schemas: factor for all bounds.
_DERIVED = 4


class RunningChecker(NamedTuple):
    """A checker's process, and this process's end of the channel."""

    sock: socket.socket
    pid: int
    is_forked: bool = True
    """True if the process must be waited for."""


class TooManyGrammars(Exception):
    """More grammars than may wait have not been checked yet."""


class GrammarCheck(Message):
    """Compile a grammar once; ``constraint`` is JSON by the names of ``structured_outputs``.

    ``mount_id`` names this mount of the model's API, because another mount may have another
    tokenizer.
    """

    check_id: int
    mount_id: int
    model: ModelToLoad
    loaded: LoadedModel
    constraint: bytes


class GrammarVerdict(Message):
    """The result of a check, and vLLM's ``backend`` for the grammar.

    ``unknown``: the check was impossible now and may be repeated.
    """

    check_id: int
    outcome: Outcome
    backend: str = ""
    reason: str = ""


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
        """Add a check. Raises TooManyGrammars: too many wait already."""
        jobs = self._by_caller.setdefault(caller, deque())
        if self._num_waiting >= MAX_WAITING or len(jobs) >= MAX_WAITING_PER_CALLER:
            if not jobs:
                del self._by_caller[caller]
            raise TooManyGrammars
        jobs.append(job)
        self._num_waiting += 1

    def take(self) -> _Job | None:
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

        Raises TooManyGrammars: too many checks are waiting.
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
        return bool(self._convictions)

    def conviction(self, model: str, key_id: str, grammar: str) -> str:
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


class OverBound(ValueError):
    """A grammar exceeds a bound; ``field`` names its field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"`{field}` {message}")
        self.field = field


class GrammarFields(msgspec.Struct):
    """The fields of a request's body, of all APIs, that define grammars; not yet parsed."""

    response_format: msgspec.Raw = msgspec.Raw()
    structured_outputs: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    output_config: msgspec.Raw = msgspec.Raw()
    output_format: msgspec.Raw = msgspec.Raw()


def check_fields(fields: GrammarFields) -> None:
    """Check a body's fields before any other reader. Raises OverBound: a field exceeds a bound."""
    for name in GrammarFields.__struct_fields__:
        raw: msgspec.Raw = getattr(fields, name)
        num_bytes = len(memoryview(raw))
        if not num_bytes:
            continue
        if num_bytes > MAX_BYTES:
            raise _over(name, "is", num_bytes, "bytes long", MAX_BYTES)
        value = _parsed(name, bytes(raw))
        _check_value(name, value)
        if name == "structured_outputs" and isinstance(value, dict):
            _check_parts(name, value)
        if name == "tools" and isinstance(value, list) and len(value) > MAX_TOOLS:
            raise _over(name, "has", len(value), "entries", MAX_TOOLS)


def check_constraint(parts: dict[str, Any]) -> bytes:
    """Check vLLM's parsed fields of a request, named as in ``structured_outputs``.

    Returns the parts as JSON. Raises OverBound: a part exceeds a bound.
    """
    field = "structured_outputs"
    _check_value(field, parts, _DERIVED)
    _check_parts(field, parts, _DERIVED)
    content = json.dumps(parts).encode()
    if len(content) > _DERIVED * MAX_BYTES:
        raise _over(field, "is", len(content), "bytes long", _DERIVED * MAX_BYTES)
    return content


def _check_parts(field: str, parts: dict[str, Any], factor: int = 1) -> None:
    choice = parts.get("choice")
    if isinstance(choice, list) and len(choice) > MAX_CHOICES:
        raise _over(f"{field}.choice", "has", len(choice), "choices", MAX_CHOICES)
    for key in _NESTED_JSON_KEYS:
        text = parts.get(key)
        if isinstance(text, str):
            name = f"{field}.{key}"
            if len(text) > factor * MAX_BYTES:
                raise _over(name, "is", len(text), "characters long", factor * MAX_BYTES)
            _check_value(name, _parsed(name, text), factor)


def _parsed(field: str, text: str | bytes) -> Any:
    """Return the JSON value, None for text that is no JSON, which vLLM refuses."""
    try:
        return json.loads(text)
    except RecursionError:
        raise OverBound(field, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        return None


def _check_value(field: str, value: Any, factor: int = 1) -> None:
    max_values, max_properties = factor * MAX_VALUES, factor * MAX_PROPERTIES
    num_values = num_properties = 0
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise OverBound(field, f"is nested deeper than {MAX_DEPTH} levels")
        num_values += len(level)
        if num_values > max_values:
            raise OverBound(field, f"has more than {max_values} values")
        children: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                num_properties += 0 if _CHECKED_KEYS.isdisjoint(one) else _check_object(field, one)
                children += one.values()
            elif isinstance(one, list):
                children += one
        if num_properties > max_properties:
            raise _over(field, "has", num_properties, "properties", max_properties)
        level = children


def _check_object(field: str, value: dict[str, Any]) -> int:
    """Check the strings in one object of a schema; return its number of declared properties."""
    for key in _PATTERN_KEYS & value.keys():
        if isinstance(value[key], str):
            _check_pattern(f"{field}: {key}", value[key])
    for key in _EBNF_KEYS & value.keys():
        text = value[key]
        if isinstance(text, str) and len(text) > MAX_EBNF_BYTES:
            raise _over(f"{field}: {key}", "is", len(text), "characters long", MAX_EBNF_BYTES)
    declared = value.get("patternProperties")
    if isinstance(declared, dict):
        for pattern in declared:
            _check_pattern(f"{field}: patternProperties", pattern)
    return sum(
        len(value[key]) for key in _PROPERTY_KEYS & value.keys() if isinstance(value[key], dict)
    )


def _check_pattern(field: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _over(field, "is", len(pattern), "characters long", MAX_PATTERN_CHARS)
    depth = group_depth(pattern)
    if depth > MAX_PATTERN_DEPTH:
        raise _over(field, "has groups nested", depth, "deep", MAX_PATTERN_DEPTH)


def group_depth(pattern: str) -> int:
    """Return the group levels in a regular expression, or more.

    Parsers disagree on the end of a character class. So an opening parenthesis always counts, and a
    closing one only outside of classes.
    """
    depth = deepest = 0
    is_escaped = is_in_class = False
    for character in pattern:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == "[":
            is_in_class = True
        elif character == "]":
            is_in_class = False
        elif character == ")" and not is_in_class:
            depth = max(0, depth - 1)
    return deepest


def _over(field: str, verb: str, number: int, unit: str, bound: int) -> OverBound:
    return OverBound(field, f"{verb} {number} {unit}; the bound is {bound}")
