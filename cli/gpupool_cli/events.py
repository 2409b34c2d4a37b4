"""``events`` and ``logs``: past and present events."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.session import open_client
from gpupoold.domain import Event

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Print new events until interrupted.")
]

JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; with --follow one per line.")
]


def events(
    ctx: typer.Context,
    follow: FollowOption = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="How many past events at most.")
    ] = 50,
    as_json: JsonLinesOption = False,
) -> None:
    """Show failures, restarts and other notable events."""
    with open_client(ctx) as client:
        past = client.events(limit=limit)
        if as_json and not follow:
            output.print_json(past)
            return
        for event in past:
            _print_event(event, as_json)
        if follow:
            for event in client.follow_events(after=past[-1].id if past else 0):
                _print_event(event, as_json)


def logs(
    ctx: typer.Context,
    follow: FollowOption = False,
    lines: Annotated[int, typer.Option("--lines", min=0, help="How many past lines.")] = 100,
    process: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only one process's lines, such as frontend-0 or worker-0."
        ),
    ] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Print the log of the daemon and its processes."""
    with open_client(ctx) as client:
        read = client.logs(lines, process, follow)
        if as_json and not follow:
            output.print_json(list(read))
            return
        for one in read:
            if as_json:
                output.print_json_line(one)
            else:
                output.print_line(f"{one.process} | {one.line}")


def _print_event(event: Event, as_json: bool) -> None:
    if as_json:
        output.print_json_line(event)
        return
    parts = [output.time_text(event.at), f"{event.level:<7}", event.kind, event.subject]
    output.print_styled([*filter(None, parts), event.message], style_of=event.level)
