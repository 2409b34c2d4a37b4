"""``cache``: show and change the models' weights snapshots in host memory."""

from __future__ import annotations

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption, NameArgument, open_client
from gpupool_cli.output import columns
from gpupoold.api.schemas import BoundEngine, CachedModel, UnpinnedMemory
from gpupoold.units import format_bytes

app = typer.Typer(
    no_args_is_help=True, help="Look at the model cache; pin, drop and warm models' snapshots."
)

_COLUMNS = columns("NAME, STATE*, NODE>, SIZE>, SAVED, PINNED, UNBOUND, LIVE>, LAST-USED")

_ENGINE_COLUMNS = columns("DEVICE>, ENGINE-OF, OUTSIDE>, ALSO-FOR")


@app.command("ls")
def ls(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show where each model's snapshot is, which engines there are, and how full the cache is."""
    with open_client(ctx) as client:
        answer = client.cache()
    if as_json:
        output.print_json(answer)
        return
    output.print_table(_COLUMNS, [_row(model) for model in answer.models])
    output.print_line("")
    if answer.engines:
        output.print_table(_ENGINE_COLUMNS, [_engine_row(engine) for engine in answer.engines])
        output.print_line("")
    host, disk = answer.host_limit_bytes, answer.disk_limit_bytes
    fields = {
        "host memory": f"{format_bytes(answer.host_bytes)} of {format_bytes(host)}",
        "disk": f"{format_bytes(answer.disk_bytes)} of {format_bytes(disk)}"
        if disk
        else "no snapshots are saved (memory.snapshot_files)",
        **{f"device {device.device}": _unpinned(device) for device in answer.unpinned},
    }
    output.print_fields(fields)


@app.command("pin")
def pin(ctx: typer.Context, name: NameArgument) -> None:
    """Keep a model's snapshot in host memory, also after a restart."""
    with open_client(ctx) as client:
        model = client.pin(name)
    missing = f"; its snapshot is loaded by `gpupool cache warm {model.name}` or with a request"
    say(f"{model.name}: pinned{'' if model.state == 'host' else missing}")


@app.command("unpin")
def unpin(ctx: typer.Context, name: NameArgument) -> None:
    """Let a model's snapshot be evicted again."""
    with open_client(ctx) as client:
        model = client.pin(name, is_pinned=False)
    say(f"{model.name}: not pinned")


@app.command("drop")
def drop(ctx: typer.Context, name: NameArgument) -> None:
    """Free the memory of a model's snapshot; the next request loads the snapshot again.

    Refused while the model is pinned or has live requests.
    """
    with open_client(ctx) as client:
        model = client.drop_snapshot(name)
    say(f"{model.name}: not in host memory")


@app.command("warm")
def warm(ctx: typer.Context, name: NameArgument) -> None:
    """Load a model's snapshot into host memory and wait for the end."""
    with open_client(ctx) as client:
        say(f"{name}: loading")
        model = client.warm(name)
    if model.state == "host":
        say(f"{model.name}: in host memory, {format_bytes(model.num_bytes)}")
    else:
        say(f"{model.name}: ready; its devices need no snapshot")


def _row(model: CachedModel) -> list[str]:
    return [
        model.name,
        _places(model),
        _nodes(model),
        output.size_text(model.num_bytes),
        _yes(model.is_saved),
        _yes(model.is_pinned),
        output.unbound_text(model.unbound_bytes) or output.NOTHING,
        str(model.num_live),
        output.NOTHING if model.last_used_at is None else output.time_text(model.last_used_at),
    ]


def _engine_row(engine: BoundEngine) -> list[str]:
    """Return an engine with the models that can take it over, or the reason why none can."""
    alone = f"no other: {engine.why_unshared}" if engine.why_unshared else output.NOTHING
    return [
        str(engine.device),
        engine.model,
        output.size_text(engine.num_bytes),
        ", ".join(engine.siblings) or alone,
    ]


def _places(model: CachedModel) -> str:
    """Return the place of the snapshot, or of each with the number of GPUs."""
    if len(model.snapshots) < 2:
        return model.state
    return ", ".join(f"{snapshot.state} ({snapshot.num_gpus})" for snapshot in model.snapshots)


def _nodes(model: CachedModel) -> str:
    nodes = {node for snapshot in model.snapshots for node in snapshot.nodes if node >= 0}
    return ", ".join(map(str, sorted(nodes))) or output.NOTHING


def _unpinned(memory: UnpinnedMemory) -> str:
    problem = f": {memory.problem}" if memory.problem else " yet"
    size = format_bytes(memory.num_bytes)
    return f"{size} of host memory are not pinned{problem}; copies pass through buffers"


def _yes(flag: bool) -> str:
    return "yes" if flag else output.NOTHING
