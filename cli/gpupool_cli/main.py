"""The ``gpupool`` command: global options and the list of commands."""

from __future__ import annotations

import io
import sys

import typer

from gpupool_cli import (
    add_model,
    batches,
    bench,
    cache,
    completion,
    config,
    doctor,
    fleet,
    history,
    hosting,
    keys,
    models,
    replay,
    run,
    status,
    tiny,
    top,
    usage,
    why,
    workers as workers,
)
from gpupool_cli.diagnostics import CliGroup
from gpupool_cli.planning import plan, simulate
from gpupool_cli.session import global_options

app = typer.Typer(
    cls=CliGroup,
    name=completion.PROGRAM,
    help="Serve many LLMs on few GPUs: talk to the gpupoold daemon on this machine.",
    epilog="Exit status: 0 ok, 1 failed, 2 usage, 3 daemon not running, 4 no such model or request,"
    " 5 refused, 6 timed out, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.callback()(global_options)
app.command("add-model")(add_model.add_model)
app.command("add-adapter")(add_model.add_adapter)
app.command("add-preset")(add_model.add_preset)
app.command("list")(models.list_models)
app.command("ls", hidden=True)(models.list_models)
app.command("show")(models.show)
app.command("set")(models.set_model)
app.command("rm")(models.rm)
app.command("host")(hosting.host)
app.command("status")(status.status)
app.command("ps")(status.ps)
app.command("top")(top.top)
app.add_typer(workers.app, name="role")
app.command("drain")(workers.drain)
app.command("undrain")(workers.undrain)
app.command("park")(workers.park)
app.command("wake")(workers.wake)
app.command("unload")(models.unload)
app.command("cancel")(models.cancel)
app.command("switches")(history.switches)
app.command("history")(history.history)
app.command("usage")(usage.usage)
app.command("batches")(batches.batches)
app.command("why")(why.why)
app.command("doctor")(doctor.doctor)
app.command("run")(run.run)
app.command("events")(history.events)
app.command("logs")(history.logs)
app.add_typer(cache.app, name="cache")
app.add_typer(keys.app, name="key")
app.add_typer(fleet.app, name="fleet")
app.add_typer(config.app, name="config")
app.command("reload")(config.reload)
bench.register(app)
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("replay")(replay.replay)
tiny.register(app)
app.command("version")(status.version)
app.command("completion")(completion.completion)


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may answer with characters outside the terminal's encoding.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name=completion.PROGRAM)


if __name__ == "__main__":
    main()
