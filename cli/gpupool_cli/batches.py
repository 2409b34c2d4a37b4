"""``batches``: the batches of clients."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption
from gpupool_cli.output import columns
from gpupool_cli.session import open_client
from gpupoold.api.schemas_batches import BatchInfo

_COLUMNS = columns(
    "BATCH, KEY, MODELS, STATE*, REQUESTS>, ANSWERED>, FAILED>, ADDED, WAITS-BECAUSE"
)


def batches(
    ctx: typer.Context,
    with_ended: Annotated[bool, typer.Option("--all", help="Include ended batches.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many batches at most.")
    ] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show the batches of clients, and why one stands still; the latest first."""
    with open_client(ctx) as client:
        found = client.batches(limit, ended=with_ended)
    if as_json:
        output.print_json(found)
        return
    output.print_table(_COLUMNS, [_row(one) for one in found])
    if not found:
        say("no batches" if with_ended else "no batches under way: --all shows ended batches too")


def _row(batch: BatchInfo) -> list[str]:
    return [
        batch.id,
        batch.key or output.NOTHING,
        ",".join(batch.models) or output.NOTHING,
        batch.state,
        str(batch.num_requests),
        str(batch.num_completed),
        str(batch.num_failed),
        output.time_text(batch.created_at),
        batch.reason or output.NOTHING,
    ]
