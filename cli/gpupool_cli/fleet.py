"""``fleet``: several boxes with one entrance."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption, PaceOption, TbtOption, TtftOption, socket_path_of
from gpupool_cli.output import columns
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.errors import UsageError
from gpupoold.fleet import operations
from gpupoold.fleet.cluster import Node
from gpupoold.fleet.operations import FleetState
from gpupoold.units import format_bytes

app = typer.Typer(no_args_is_help=True, help="Several boxes: one entrance for their models.")

SECRET_VARIABLE = "GPUPOOL_FLEET_SECRET"
_NODES = columns("NODE, STATE*, URL, DEVICES>, MEMORY>, MODELS>, LIVE>, LOAD>")
_MODELS = columns("MODEL, NODES, LIVE>, STATE*")

NameOption = Annotated[
    str, typer.Option("--name", metavar="NODE", help="Name of this node; default: the host's.")
]
IpOption = Annotated[
    str, typer.Option("--ip", metavar="ADDRESS", help="Address of this node in the fleet.")
]
UrlOption = Annotated[
    str, typer.Option("--url", metavar="URL", help="Where the entrance reaches this node's daemon.")
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Name of a node.")]


@app.command("up")
def up(
    ctx: typer.Context,
    name: NameOption = "",
    ip: IpOption = "",
    url: UrlOption = "",
    port: Annotated[int, typer.Option("--port", help="Port of Ray's head.")] = 6379,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Where the entrance listens; default IP:8080."
        ),
    ] = "",
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, max=64, help="Processes of the entrance.")
    ] = 2,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="An entrance on each node, not on this alone.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Use this Ray cluster instead of a new one."),
    ] = None,
) -> None:
    """Start a fleet: this node is its first and its head."""
    ip = ip or operations.own_ip()
    host, entrance_port = _address(listen or f"{ip}:8080")
    entrance = operations.EntranceOptions(
        host=host, port=entrance_port, num_replicas=replicas, is_everywhere=everywhere
    )
    found = operations.up(
        socket_path_of(ctx), name or _host_name(), ip, url, port, entrance, ray_address=ray
    )
    say(f"The fleet is up: http://{host}:{entrance_port}/v1")
    say("On each other node, with the secret that `gpupool fleet secret` prints here:")
    say(f"  {SECRET_VARIABLE}=... gpupool fleet join {found.ray_address}")


@app.command("join")
def join(
    ctx: typer.Context,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of Ray's head.")],
    name: NameOption = "",
    ip: IpOption = "",
    url: UrlOption = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file",
            metavar="FILE",
            help=f"The fleet's secret; default: ${SECRET_VARIABLE}.",
        ),
    ] = None,
    existing: Annotated[
        bool, typer.Option("--existing-ray", help="Ray runs on this node already.")
    ] = False,
) -> None:
    """Let this node join a fleet."""
    found = operations.join(
        socket_path_of(ctx),
        address,
        _secret(secret_file),
        name or _host_name(),
        ip or operations.own_ip(address),
        url,
        owns_ray=not existing,
    )
    say(f"This node is {found.name} in the fleet at {found.ray_address}.")


@app.command("resume")
def resume(ctx: typer.Context) -> None:
    """Enter the fleet again after a restart of the machine."""
    found = operations.resume(socket_path_of(ctx))
    say(f"This node is {found.name} in the fleet at {found.ray_address} again.")


@app.command("leave")
def leave(ctx: typer.Context) -> None:
    """Take this node out of its fleet; the daemon keeps its models."""
    found = operations.leave(socket_path_of(ctx))
    say(f"{found.name} has left the fleet at {found.ray_address}.")


@app.command("secret")
def secret(ctx: typer.Context) -> None:
    """Print the secret of this node's fleet, with which other nodes join."""
    typer.echo(operations.secret_of(socket_path_of(ctx)))


@app.command("status")
def status(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Show the nodes and the models of the fleet."""
    found = operations.state(socket_path_of(ctx))
    if as_json:
        output.print_json(_as_json(found))
        return
    output.print_table(_NODES, [_node_row(node) for node in found.table.nodes])
    typer.echo()
    output.print_table(_MODELS, _model_rows(found))
    for what, why in sorted(found.problems.items()):
        say(f"{what}: {why}")


@app.command("top")
def top(
    ctx: typer.Context,
    interval: Annotated[
        float, typer.Option("--interval", min=0.5, help="Seconds between two looks.")
    ] = 2.0,
) -> None:
    """Show nodes, models and problems, refreshed until Ctrl-C."""
    with operations.watching(socket_path_of(ctx)) as state_now:
        output.show_live(lambda: _screen(state_now()), interval)


@app.command("drain")
def drain(ctx: typer.Context, node: NodeArgument) -> None:
    """Send a node no more requests, and place its models on others."""
    operations.drain(socket_path_of(ctx), node, is_draining=True)
    say(f"{node} gets no more requests; `gpupool fleet status` shows what is left there.")


@app.command("undrain")
def undrain(ctx: typer.Context, node: NodeArgument) -> None:
    """Send requests to a node again."""
    operations.drain(socket_path_of(ctx), node, is_draining=False)
    say(f"{node} gets requests again.")


@app.command("set")
def set_model(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model that the fleet places.")],
    ttft: TtftOption = None,
    tbt: TbtOption = None,
    pace: PaceOption = None,
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, max=1000, metavar="N", help="At least so many nodes."),
    ] = None,
) -> None:
    """Change a model's targets and pace on all nodes, or the least number of nodes."""
    change = SetModelRequest(ttft_s=ttft, tbt_s=tbt, pace=pace)
    if change == SetModelRequest() and replicas is None:
        raise UsageError(
            f"no change given for {model!r}", "give --ttft, --tbt, --pace or --replicas"
        )
    operations.set_model(socket_path_of(ctx), model, change, replicas)
    say(f"{model}: changed; `gpupool fleet status` shows the nodes")


@app.command("rm")
def rm(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model that the fleet places.")],
) -> None:
    """Remove a model from the fleet and all its nodes, after its running requests."""
    operations.remove_model(socket_path_of(ctx), model)
    say(f"{model} is removed from all nodes.")


def _screen(found: FleetState) -> list[str]:
    return [
        *output.aligned(_NODES, [_node_row(node) for node in found.table.nodes]),
        "",
        *output.aligned(_MODELS, _model_rows(found)),
        "",
        *(f"{what}: {why}" for what, why in sorted(found.problems.items())),
    ]


def _node_row(node: Node) -> list[str]:
    report = node.report
    state = "ready" if report.is_ready else "starting"
    state = "lost" if node.is_lost else "draining" if node.is_draining else state
    load = sum(model.load for model in report.models) / max(1, node.num_devices)
    return [
        node.name,
        state,
        node.url,
        str(node.num_devices),
        format_bytes(sum(report.device_bytes)),
        str(len(report.models)),
        str(sum(model.num_live for model in report.models)),
        f"{load:.0%}",
    ]


def _model_rows(found: FleetState) -> list[list[str]]:
    rows = []
    nodes = found.table.nodes
    names = set(found.specs) | {model.name for node in nodes for model in node.report.models}
    for name in sorted(names):
        having = [(node, model) for node in nodes if (model := node.model(name)) is not None]
        states = sorted({"lost" if node.is_lost else model.state for node, model in having})
        ongoing = [node.name for node in nodes if name in node.ongoing]
        state = ", ".join(states) or ("being added" if ongoing else "waits for a node")
        if name not in found.specs:
            state += " (not placed by the fleet)"
        where = ", ".join(node.name for node, _ in having) or "-"
        rows.append([name, where, str(sum(model.num_live for _, model in having)), state])
    return rows


def _as_json(found: FleetState) -> dict[str, object]:
    return {
        "nodes": [
            {
                "name": node.name,
                "url": node.url,
                "is_lost": node.is_lost,
                "is_draining": node.is_draining,
                "ongoing": sorted(node.ongoing),
                "report": node.report.model_dump(exclude={"secret"}),
            }
            for node in found.table.nodes
        ],
        "models": {
            name: {"request": spec.request.model_dump(), "least_replicas": spec.least_replicas}
            for name, spec in found.specs.items()
        },
        "problems": found.problems,
    }


def _secret(path: Path | None) -> str:
    try:
        text = os.environ.get(SECRET_VARIABLE, "") if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise UsageError(
            "the secret of the fleet is missing",
            f"set ${SECRET_VARIABLE} or give --secret-file, with what `gpupool fleet secret` "
            "prints on the first node",
        )
    return text.strip()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _host_name() -> str:
    return socket.gethostname().partition(".")[0]
