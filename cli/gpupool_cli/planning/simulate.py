"""``gpupool simulate``: a simulated box under scheduling policies, in virtual time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.progress import BarColumn, TimeElapsedColumn

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption, TbtOption, TtftOption, duration_s
from gpupool_cli.output import NOTHING, Column, columns, duration_text, print_line, print_table
from gpupool_cli.planning import inputs
from gpupool_cli.planning.plot import check_plot, save_plot
from gpupool_cli.progress import BarView, description_column
from gpupoold.config.file import read_config_file
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.metrics import Goodput
from gpupoold.sim.presets import poisson_panel, preset_names, preset_panels, trace_panel
from gpupoold.sim.run import RunRow, run_points, sweep_goodput
from gpupoold.sim.scenario import AUTO, FigurePanel, Overrides, Point, changed_panel, parse_roles

_LIST_COLUMNS = (Column("PRESET"), Column("WHAT"))

_SHOW_EVERY_S = 0.1
_COLUMNS = columns(
    "PRESET, POLICY, DEVICES, MODELS>, RPS>, SLO%>, BOUND%>, PAPER%>, TTFT-p50>, TTFT-p99>, "
    "TBT-p99>, SWITCHES>"
)
_ACTIVE = Column("ACTIVE", right=True)
_PREEMPTED = Column("PREEMPTED", right=True)
_ENGINES = columns("LOADS>, TAKEOVERS>")
_STAGES = columns("ROLES, TTFT%>, TBT%>")
_BURST = (Column("BURST-p50", right=True), Column("BURST-p99", right=True))
_GOODPUT_COLUMNS = columns("PRESET, POLICY, 90 % GOODPUT")


def _complete_preset(incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


def simulate(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET",
            help="An experiment by name; see --list.",
            autocompletion=_complete_preset,
        ),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list", help="List the presets with descriptions.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests to play: a .csv or .csv.gz file.")
    ] = None,
    policies: Annotated[
        str | None, typer.Option("--policy", help="Policies to compare, separated by commas.")
    ] = None,
    models: Annotated[
        str | None, typer.Option(help="Numbers of models, separated by commas.")
    ] = None,
    rps: Annotated[
        str | None, typer.Option(help="Requests per second and model, separated by commas.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="The box, such as 16xH800 or 4xA10.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs per model (tensor parallelism).")
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(metavar="K", help="Prefill devices, for policies with separate roles."),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(help="Roles of the devices: auto, mixed, or a list like 2xprefill,6xdecode."),
    ] = None,
    ttft: TtftOption = None,
    tbt: TbtOption = None,
    switch_overhead: Annotated[
        float | None,
        typer.Option(parser=duration_s, metavar="DURATION", help="Added to every switch."),
    ] = None,
    kv_host: inputs.KvHostOption = None,
    model_cache: inputs.ModelCacheOption = None,
    engine_memory: inputs.EngineMemoryOption = None,
    engines_limit: inputs.EnginesLimitOption = None,
    engine_load: inputs.EngineLoadOption = None,
    far_share: inputs.FarShareOption = None,
    families: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Models are fine-tunes of N models and share their engines; default: none do.",
        ),
    ] = None,
    prefix_cache: inputs.PrefixCacheOption = None,
    duration: Annotated[
        float | None,
        typer.Option(parser=duration_s, metavar="DURATION", help="How long requests arrive."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same requests.")] = None,
    workloads: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", envvar="GPUPOOL_WORKLOADS", help="Where presets find recorded workloads."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Processes to run points in.")] = 1,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw attainment: a .svg or .png file.")
    ] = None,
) -> None:
    """Simulate a box of GPUs: a preset, a file of requests, or Poisson arrivals.

    A preset sets all options except --jobs, --json and --plot; given options override the preset.
    Without a preset the values of aegaeon-fig11a apply, with 40 and 70 models.
    """
    if list_presets:
        _print_presets()
        return
    if plot is not None:
        check_plot(plot)
    wishes = inputs.host_wishes(
        kv_host, model_cache, engine_memory, engines_limit, engine_load, far_share, prefix_cache
    )
    wanted = Overrides(
        policies=None if policies is None else output.names(policies),
        models=None if models is None else output.numbers("--models", models, int, "40,70,100"),
        rps=None if rps is None else output.numbers("--rps", rps, float, "0.1,0.2"),
        box=None if devices is None else parse_box(devices),
        tensor_parallel_size=tensor_parallel,
        num_prefill=prefill,
        roles=None if roles is None else parse_roles(roles),
        ttft_s=ttft,
        tbt_s=tbt,
        duration_s=duration,
        seed=seed,
        switch_overhead_s=switch_overhead,
        host_wishes=wishes,
        num_families=families,
    )
    points = _points(_panels(preset, trace), wanted, workloads)
    rows = _run(points, jobs, as_json)
    if not as_json:
        print_rows(rows)
    if plot is not None:
        save_plot(rows, {point.preset: point.panel.title for point in points}, plot)
        say(f"plot: {plot}")


def _panels(preset: str | None, trace: Path | None) -> tuple[FigurePanel, ...]:
    if preset is not None and trace is not None:
        raise UsageError("both a preset and --trace: give one of the two")
    if trace is not None:
        return (trace_panel(trace),)
    return (poisson_panel(),) if preset is None else preset_panels(preset)


def _points(
    panels: Sequence[FigurePanel], wanted: Overrides, workloads: Path | None
) -> list[Point]:
    if workloads is None and any(panel.workload.needs_folder for panel in panels):
        workloads = read_config_file().settings.paths.workloads_dir
    wanted = replace(wanted, workloads_dir=workloads)
    found = [changed_panel(panel, wanted) for panel in panels]
    for reason in dict.fromkeys(why for _, left_out in found for why in left_out):
        say(f"left out: {reason}; other models take its place")
    return [point for panel, _ in found for point in panel.points()]


def _run(points: Sequence[Point], jobs: int, as_json: bool) -> list[RunRow]:
    """Run all points and return the rows; with ``as_json`` print each row at once."""
    rows: list[RunRow] = []
    with PointsView(points, jobs, keeps_stdout=as_json) as view:
        for row in run_points(points, jobs=jobs, on_progress=view.show):
            rows.append(row)
            view.finished(len(rows))
            if as_json and "refused" not in row:
                print_line(json.dumps(row))
    _print_refusals(rows)
    return rows


def _print_refusals(rows: Sequence[RunRow]) -> None:
    """Print the refused points to stderr. Raises UsageError if all points were refused."""
    refusals = [row for row in rows if "refused" in row]
    if len(refusals) == len(rows):
        raise UsageError(refusals[0]["refused"])
    for row in refusals:
        say(f"{row['preset']}: {row['policy']}, {row['models']} models: {row['refused']}")


def _print_presets() -> None:
    rows = []
    for name in preset_names():
        panels = preset_panels(name)
        names = [panel.name for panel in panels]
        several = f"{len(names)} panels, {names[0]} to {names[-1]}"
        rows.append((name, panels[0].title if len(panels) == 1 else several))
    print_table(_LIST_COLUMNS, rows)


class PointsView(BarView):
    """The progress of a list of points; use as a context manager.

    Draws a bar on a terminal, else prints a line per point. With ``keeps_stdout`` the rows are
    printed to stdout at the same time, so no bar is drawn if stdout is a terminal.
    """

    def __init__(self, points: Sequence[Point], jobs: int, *, keeps_stdout: bool) -> None:
        wanted = not (keeps_stdout and sys.stdout.isatty())
        super().__init__(description_column(), BarColumn(), TimeElapsedColumn(), wanted=wanted)
        self._points = points
        self._in_order = jobs == 1
        self._shown_s = 0.0
        if self._bar is not None:
            self._task = self._bar.add_task("", total=len(points))

    def __enter__(self) -> Self:
        super().__enter__()
        if self._in_order:
            self._write(0)
        return self

    def show(self, index: int, at_s: float, duration_s: float) -> None:
        """Show that point ``index`` is at the virtual time ``at_s`` of ``duration_s``."""
        if self._bar is None or time.monotonic() - self._shown_s < _SHOW_EVERY_S:
            return
        self._shown_s = time.monotonic()
        done = index + min(1.0, at_s / duration_s)
        text = f"{self._label(index)}, {min(at_s, duration_s):.0f} s of {duration_s:.0f}"
        self._bar.update(self._task, completed=done, description=text)

    def finished(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=count)
        if not self._in_order:
            self._write(count - 1)
        elif count < len(self._points):
            self._write(count)

    def _write(self, index: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=self._label(index))
        else:
            say(self._label(index))

    def _label(self, index: int) -> str:
        return f"{index + 1} of {len(self._points)}: {self._points[index]}"


def print_rows(rows: Sequence[RunRow]) -> None:
    """Print a table of the rows, and a table of goodputs for presets that sweep a load."""
    more = _more_columns(rows)
    columns = [*_COLUMNS, *(column for column, _ in more)]
    print_table(columns, [[*_cells(row), *(cell(row) for _, cell in more)] for row in rows])
    goodputs = sweep_goodput(rows)
    if goodputs:
        print_line("")
        axes = {row["preset"]: row["axis"] for row in rows}
        lowest = {
            preset: min(row[axis] for row in rows if row["preset"] == preset)
            for preset, axis in axes.items()
        }
        print_table(
            _GOODPUT_COLUMNS,
            [
                (preset, policy, _goodput_text(best, axes[preset], lowest[preset]))
                for (preset, policy), best in goodputs.items()
            ],
        )


def _goodput_text(best: Goodput | None, axis: str, lowest: float) -> str:
    if best is None:
        return f"less than {lowest:g} {axis}"
    return f"{'at least ' if best.is_lower_bound else ''}{best.load:.3g} {axis}"


def _more_columns(rows: Sequence[RunRow]) -> list[tuple[Column, Callable[[RunRow], str]]]:
    """Return the columns that only some experiments need, with functions for the cells."""
    more: list[tuple[Column, Callable[[RunRow], str]]] = []
    if any("active_models_mean" in row for row in rows):
        more.append((_ACTIVE, _active))
    if any("num_preemptions" in row for row in rows):
        more.append((_PREEMPTED, lambda row: str(row.get("num_preemptions", 0))))
    if any(row.get("engine_loads") or row.get("engine_takeovers") for row in rows):
        counts = (
            lambda row: str(row.get("engine_loads", NOTHING)),
            lambda row: str(row.get("engine_takeovers", NOTHING)),
        )
        more += zip(_ENGINES, counts, strict=True)
    if any(row["roles"] != AUTO for row in rows):
        cells = (
            lambda row: row["roles"],
            lambda row: _percent(row["ttft_attainment"]),
            lambda row: _percent(row["tbt_attainment"]),
        )
        more += zip(_STAGES, cells, strict=True)
    if any("burst_ttft_p50_s" in row for row in rows):
        bursts = (
            lambda row: duration_text(row.get("burst_ttft_p50_s")),
            lambda row: duration_text(row.get("burst_ttft_p99_s")),
        )
        more += zip(_BURST, bursts, strict=True)
    return more


def _active(row: RunRow) -> str:
    return f"{row['active_models_mean']:.2f}" if "active_models_mean" in row else NOTHING


def _cells(row: RunRow) -> list[str]:
    named = [row["preset"], row["policy"], row["devices"], str(row["models"]), f"{row['rps']:.3g}"]
    metrics = (row["attainment"], row["attainment_bound"], row["attainment_paper"])
    shares = [_percent(share) for share in metrics]
    times = [duration_text(row[key]) for key in ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s")]
    switches = NOTHING if "refused" in row else str(row["switches"])
    return [*named, *shares, *times, switches]


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}".rstrip("%")
