"""``gpupool replay``: the scheduling core's event log, fetched and replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.options import JsonOption, open_client
from gpupoold.errors import Failed, UsageError
from gpupoold.replay.log_file import Replay, replay_file, write

# Of a difference that is printed: calls have no bound.
_MAX_CHARACTERS = 2000


def replay(
    ctx: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="An event log, as lines of JSON.")],
    record: Annotated[
        bool, typer.Option("--record", help="Write the daemon's event log to FILE first.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Repeat the recorded decisions of a daemon's scheduler, and compare.

    Exit status 1 and the first decision that differs if any does; needs a daemon only for --record.
    """
    try:
        if record:
            with open_client(ctx) as client:
                write(path, (line + b"\n" for line in client.event_log()))
        done = replay_file(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error
    if as_json:
        output.print_json(_document(done))
    else:
        output.print_fields(_fields(done))
    if done.difference is not None:
        text = str(done.difference)
        shown = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."
        raise Failed(f"{path}, line {done.line}: {shown}")


def _fields(done: Replay) -> dict[str, str]:
    begins = "with the state of a running daemon" if done.header.has_state else "with a new core"
    return {
        "policy": done.header.policy,
        "begins": begins,
        "calls": f"{done.num_entries} in {output.duration_text(done.last_s - done.first_s)}",
        "events": _counts(done.events),
        "actions": _counts(done.actions),
        "result": "the same actions" if done.difference is None else "other actions",
    }


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(counter.items()))


def _document(done: Replay) -> dict[str, object]:
    return {
        "policy": done.header.policy,
        "version": done.header.version,
        "has_state": done.header.has_state,
        "calls": done.num_entries,
        "duration_s": done.last_s - done.first_s,
        "events": done.events,
        "actions": done.actions,
        "is_equal": done.difference is None,
    }
