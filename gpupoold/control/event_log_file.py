"""An event log as a file of JSON lines: a header, then one entry per line.

Only a log that starts with a new core can be replayed: the file has no snapshot of the core's
state.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from gpupoold.errors import UsageError
from gpupoold.scheduling.actions import Action
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.event_log import Difference, Stimulus, replay_on
from gpupoold.scheduling.events import Event
from gpupoold.scheduling.policies.named import POLICY_NAMES, PolicyOptions, make_policy

FORMAT = "gpupool-stimuli-1"
_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
_ACTIONS: dict[str, type] = {kind.__name__: kind for kind in get_args(Action)}


class Header(msgspec.Struct, frozen=True):
    """The policy and version of a log."""

    policy: str
    options: PolicyOptions = msgspec.field(default_factory=PolicyOptions)
    format: str = FORMAT


class _Line(msgspec.Struct, omit_defaults=True):
    now_s: float
    events: list[dict[str, Any]] = []
    actions: list[dict[str, Any]] = []
    error: str | None = None


def write(path: Path, header: Header, stimuli: Iterable[Stimulus]) -> None:
    """Write a log that starts with a new core; replace an existing file at the end.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(lines(header, stimuli))
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def lines(header: Header, stimuli: Iterable[Stimulus]) -> Iterator[bytes]:
    """Yield the lines of a log file, each with a newline."""
    yield msgspec.json.encode(header) + b"\n"
    for stimulus in stimuli:
        yield msgspec.json.encode(_line(stimulus)) + b"\n"


def read(path: Path) -> tuple[Header, list[Stimulus]]:
    """Header and stimuli of a file.

    Raises:
        UsageError: not such a file; the message names the line.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        numbered = enumerate(file, start=1)
        header = _read_header(path, numbered)
        return header, [_read_stimulus(path, number, line) for number, line in numbered]


def replay_file(path: Path) -> Difference | None:
    """Replay a file through a new core; return the first difference, or None.

    Raises:
        UsageError: the file is not an event log, or its policy is unknown.
        OSError: the file cannot be read.
    """
    header, stimuli = read(path)
    if header.policy not in POLICY_NAMES:
        known = ", ".join(POLICY_NAMES)
        raise UsageError(f"{path}: no policy is named {header.policy!r}", f"known: {known}")
    return replay_on(Core(make_policy(header.policy, header.options)), stimuli)


def _read_header(path: Path, lines: Iterator[tuple[int, bytes]]) -> Header:
    _, line = next(lines, (1, b""))
    try:
        header = msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a log of stimuli: {error}") from None
    if header.format != FORMAT:
        raise UsageError(f"{path} is in format {header.format!r}", f"this version reads {FORMAT}")
    return header


def _read_stimulus(path: Path, number: int, line: bytes) -> Stimulus:
    try:
        raw = msgspec.json.decode(line, type=_Line)
        return Stimulus(
            raw.now_s,
            tuple(_untagged(one, _EVENTS) for one in raw.events),
            tuple(_untagged(one, _ACTIONS) for one in raw.actions),
            raw.error,
        )
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}, line {number}: {error}") from None


def _line(stimulus: Stimulus) -> _Line:
    return _Line(
        stimulus.now_s,
        [_tagged(event) for event in stimulus.events],
        [_tagged(action) for action in stimulus.actions],
        stimulus.error,
    )


def _tagged(one: Event | Action) -> dict[str, Any]:
    fields: dict[str, Any] = _finite(dataclasses.asdict(one))
    return {"type": type(one).__name__, **fields}


def _untagged(fields: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    tag = fields.get("type")
    if not isinstance(tag, str) or tag not in kinds:
        raise msgspec.ValidationError(f"type {tag!r} is none of {', '.join(kinds)}")
    # Not strict: "inf" is a number here.
    return msgspec.convert(fields, kinds[tag], strict=False)


def _finite(value: Any) -> Any:
    """Return the value with text in place of numbers that JSON does not support."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
