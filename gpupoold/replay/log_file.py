"""An event log as a file of JSON lines: a header, the core's first state, and the entries.

A log that begins with a new core has no state (:mod:`.core_state`). Files need no trust: sizes are
bounded, no file can run code, and messages name the file and the line.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec

from gpupoold import __version__
from gpupoold.errors import UsageError
from gpupoold.replay.core_state import BadLine, Line, core_of, lines_of
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action, Event, Stepped
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.named import POLICY_NAMES, PolicyOptions, make_policy
from gpupoold.scheduling.state import State
from gpupoold.units import format_bytes

FORMAT = "gpupool-event-log-2"
MAX_LINE_BYTES = 16 << 20
MAX_FILE_BYTES = 1 << 30
_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_ACTIONS: dict[str, type] = {kind.__name__: kind for kind in get_args(Action)}

_Numbered = Iterator[tuple[int, bytes]]

# Copies, which take some milliseconds with a thousand requests, are rare enough at this size.
MAX_ENTRIES = 10_000
MAX_NAMES = 200_000
"""Requests in the steps of a log, some 90 bytes each: 2,000 steps of 100 requests."""


class Header(msgspec.Struct, frozen=True):
    """The policy of a log, and the version of gpupool that wrote the log."""

    policy: str
    options: PolicyOptions = msgspec.field(default_factory=PolicyOptions)
    format: str = FORMAT
    version: str = __version__
    has_state: bool = False


class _Entry(msgspec.Struct, omit_defaults=True):
    now_s: float
    events: list[dict[str, Any]] = []
    actions: list[dict[str, Any]] = []
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A call of ``handle`` and its result: actions, or the raised error.

    The log consists of segments. Each segment begins with a copy of the core, so that earlier
    entries can be dropped: when the second segment is full, the first is dropped.
    """

    now_s: float
    events: tuple[Event, ...]
    actions: tuple[Action, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class LogSegment:
    """The calls since the core had the state ``base``."""

    base: bytes
    entries: list[LogEntry] = field(default_factory=list)

    def core(self) -> Core:
        """Return a copy of the core's state at the beginning."""
        core: Core = pickle.loads(self.base)
        return core


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call, by number from 0, whose result differs from the record."""

    index: int
    recorded: LogEntry
    replayed: LogEntry

    def __str__(self) -> str:
        recorded, replayed = self.recorded, self.replayed
        return (
            f"entry {self.index} at {recorded.now_s} s: recorded "
            f"{recorded.error or list(recorded.actions)}, replayed "
            f"{replayed.error or list(replayed.actions)}"
        )


class RecordedCore:
    """A core that records its latest calls.

    There are ``max_entries`` at most, with ``max_names`` requests in their steps. As soon as there
    were more, at least half of one of the two numbers is kept.
    """

    def __init__(
        self, core: Core, max_entries: int = MAX_ENTRIES, max_names: int = MAX_NAMES
    ) -> None:
        """Record from now on. Raises ValueError: ``max_entries`` is less than 2."""
        if max_entries < 2:
            raise ValueError(f"max_entries is {max_entries}, must be at least 2")
        state = core.state
        self._core = core
        self._is_from_start = not (state.models or state.devices or state.requests)
        self._max_per_segment = max_entries // 2
        self._max_names_per_segment = max_names // 2
        self._num_names = 0  # in the last segment
        self._segments = [_new_segment(core)]

    @property
    def state(self) -> State:
        return self._core.state

    @property
    def policy(self) -> Policy:
        return self._core.policy

    @property
    def segments(self) -> tuple[LogSegment, ...]:
        """The recorded segments in order: one or two."""
        return tuple(self._segments)

    @property
    def is_from_start(self) -> bool:
        """True if the log reaches back to a new core."""
        return self._is_from_start

    def entries(self) -> tuple[LogEntry, ...]:
        return tuple(entry for segment in self._segments for entry in segment.entries)

    def handle(self, events: Iterable[Event], now_s: float) -> list[Action]:
        """Handle events as :meth:`Core.handle` does, with the same errors, and record the call."""
        given = tuple(events)
        segment = self._segments[-1]
        num_names = sum(len(event.request_ids) for event in given if isinstance(event, Stepped))
        is_full = self._num_names + num_names > self._max_names_per_segment
        if len(segment.entries) >= self._max_per_segment or (is_full and segment.entries):
            segment = self._turn_over()
        self._num_names += num_names
        try:
            actions = self._core.handle(given, now_s)
        except Exception as error:
            segment.entries.append(LogEntry(now_s, given, (), _described(error)))
            raise
        segment.entries.append(LogEntry(now_s, given, tuple(actions)))
        return actions

    def _turn_over(self) -> LogSegment:
        self._is_from_start = self._is_from_start and len(self._segments) == 1
        self._num_names = 0
        self._segments = [self._segments[-1], _new_segment(self._core)]
        return self._segments[-1]


def replay_on(core: Core, entries: Iterable[LogEntry]) -> Difference | None:
    """Replay entries on this core, which changes; return the first difference."""
    for index, recorded in enumerate(entries):
        try:
            actions = core.handle(recorded.events, recorded.now_s)
            replayed = LogEntry(recorded.now_s, recorded.events, tuple(actions))
        except Exception as error:
            replayed = LogEntry(recorded.now_s, recorded.events, (), _described(error))
        if (replayed.actions, replayed.error) != (recorded.actions, recorded.error):
            return Difference(index, recorded, replayed)
    return None


def _new_segment(core: Core) -> LogSegment:
    # Six times as fast as copy.deepcopy, and without objects for the garbage collector to walk.
    return LogSegment(pickle.dumps(core, pickle.HIGHEST_PROTOCOL))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@dataclasses.dataclass(frozen=True, slots=True)
class LogFile:
    """An open log: the header, a core in the first state, and the entries with line numbers."""

    header: Header
    core: Core
    entries: Iterator[tuple[int, LogEntry]]


@dataclasses.dataclass(slots=True)
class Replay:
    """The replayed part of a log: all of the log, or up to the first difference.

    ``first_s`` and ``last_s`` are times of the daemon's monotonic clock; ``events`` and ``actions``
    are counts by kind; ``line`` is the number of the last replayed line.
    """

    header: Header
    num_entries: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    events: Counter[str] = dataclasses.field(default_factory=Counter)
    actions: Counter[str] = dataclasses.field(default_factory=Counter)
    line: int = 0
    difference: Difference | None = None

    def count(self, line: int, entry: LogEntry) -> None:
        """Add an entry to the counts, before the replay of the entry."""
        if not self.num_entries:
            self.first_s = entry.now_s
        self.num_entries += 1
        self.last_s, self.line = entry.now_s, line
        self.events.update(type(event).__name__ for event in entry.events)
        self.actions.update(type(action).__name__ for action in entry.actions)


def write(path: Path, lines: Iterable[bytes]) -> None:
    """Write the lines of a log; an existing file is replaced when all lines are written."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(lines)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def lines(
    header: Header, entries: Iterable[LogEntry], first: LogSegment | None = None
) -> Iterator[bytes]:
    """Yield the lines of a log file, each with a newline.

    ``first`` is the first segment of the log, None for a log that begins with a new core.
    """
    header = msgspec.structs.replace(header, has_state=first is not None)
    yield msgspec.json.encode(header) + b"\n"
    if first is not None:
        for line in lines_of(first.core()):
            yield msgspec.json.encode(line) + b"\n"
    for entry in entries:
        yield msgspec.json.encode(_line(entry)) + b"\n"


@contextmanager
def open_log(path: Path) -> Iterator[LogFile]:
    """Open a log; entries are read on demand, and reading an entry raises the same errors.

    Raises:
        UsageError: the file is not an event log of a known policy, is of another version, or is too
            large; the message names the line.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        numbered = _numbered(path, file)
        header = _read_header(path, numbered)
        core = Core(make_policy(header.policy, header.options))
        if header.has_state:
            core, numbered = _read_state(path, numbered)
        yield LogFile(header, core, ((n, _read_entry(path, n, line)) for n, line in numbered))


def replay_file(path: Path) -> Replay:
    """Replay a log up to the first difference. Raises UsageError, OSError: as for ``open_log``."""
    with open_log(path) as log:
        replay = Replay(log.header)

        def counted() -> Iterator[LogEntry]:
            for line, entry in log.entries:
                replay.count(line, entry)
                yield entry

        replay.difference = replay_on(log.core, counted())
    return replay


def _numbered(path: Path, file: BinaryIO) -> _Numbered:
    num_bytes = 0
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        num_bytes += len(line)
        if len(line) > MAX_LINE_BYTES or num_bytes > MAX_FILE_BYTES:
            limits = f"a line has at most {format_bytes(MAX_LINE_BYTES)}, "
            limits += f"a log {format_bytes(MAX_FILE_BYTES)}"
            raise UsageError(f"{path}, line {number}: too large for an event log", limits)
        if not line:
            return
        yield number, line


def _read_header(path: Path, numbered: _Numbered) -> Header:
    _, line = next(numbered, (1, b""))
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path} is not an event log: {error}") from None
    if header.format != FORMAT:
        raise UsageError(f"{path} is in format {header.format!r}", f"this version reads {FORMAT}")
    if header.policy not in POLICY_NAMES:
        known = ", ".join(POLICY_NAMES)
        raise UsageError(f"{path}: no policy is named {header.policy!r}", f"known: {known}")
    if header.has_state and header.version != __version__:
        raise UsageError(
            f"{path} has a state of gpupool {header.version}, this is {__version__}",
            f"use gpupool {header.version} to replay the log; only a log from a daemon's start can "
            "be replayed by other versions",
        )
    return header


def _read_state(path: Path, numbered: _Numbered) -> tuple[Core, _Numbered]:
    """Return the core, and the lines that follow the core's state."""
    state = []
    for number, line in numbered:
        if not line.startswith(b"["):
            numbered = chain([(number, line)], numbered)
            break
        try:
            state.append(msgspec.json.decode(line, type=Line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    try:
        return core_of(state), numbered
    except BadLine as error:
        raise UsageError(f"{path}, line {error.number + 2}: {error.problem}") from None


def _read_entry(path: Path, number: int, line: bytes) -> LogEntry:
    try:
        raw = msgspec.json.decode(line, type=_Entry)
        return LogEntry(
            raw.now_s,
            tuple(_untagged(event, _EVENTS) for event in raw.events),
            tuple(_untagged(action, _ACTIONS) for action in raw.actions),
            raw.error,
        )
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"{path}, line {number}: {error}") from None


def _line(entry: LogEntry) -> _Entry:
    return _Entry(
        entry.now_s,
        [_tagged(event) for event in entry.events],
        [_tagged(action) for action in entry.actions],
        entry.error,
    )


def _tagged(one: Event | Action) -> dict[str, Any]:
    fields: dict[str, Any] = _finite(dataclasses.asdict(one))
    return {"type": type(one).__name__, **fields}


def _untagged(fields: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    tag = fields.get("type")
    if not isinstance(tag, str) or tag not in kinds:
        raise msgspec.ValidationError(f"type {tag!r} is none of {', '.join(kinds)}")
    # Not strict, because infinite numbers are written as the text "inf".
    return msgspec.convert(fields, kinds[tag], strict=False)


def _finite(value: Any) -> Any:
    """Return the value with text in place of numbers that JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
