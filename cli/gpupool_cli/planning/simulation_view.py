"""The output of ``gpupool simulate``: progress on stderr, tables on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.progress import BarColumn, TimeElapsedColumn

from gpupool_cli.diagnostics import say
from gpupool_cli.output import NOTHING, Column, columns, duration_text, print_line, print_table
from gpupool_cli.progress import BarView, description_column
from gpupoold.sim.metrics import Goodput
from gpupoold.sim.roles_text import AUTO
from gpupoold.sim.run import RunRow, sweep_goodput
from gpupoold.sim.scenario import Point

_SHOW_EVERY_S = 0.1
_COLUMNS = columns(
    "PRESET, POLICY, DEVICES, MODELS>, RPS>, SLO%>, BOUND%>, PAPER%>, TTFT-p50>, TTFT-p99>, "
    "TBT-p99>, SWITCHES>"
)
_ACTIVE = Column("ACTIVE", right=True)
_PREEMPTED = Column("PREEMPTED", right=True)
_STAGES = columns("ROLES, TTFT%>, TBT%>")
_BURST = (Column("BURST-p50", right=True), Column("BURST-p99", right=True))
_GOODPUT_COLUMNS = columns("PRESET, POLICY, 90 % GOODPUT")


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
        """Show that the first ``count`` points are done."""
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
        lowest = {preset: _lowest(rows, preset) for preset in axes}
        print_table(
            _GOODPUT_COLUMNS,
            [
                (preset, policy, _goodput_text(best, axes[preset], lowest[preset]))
                for (preset, policy), best in goodputs.items()
            ],
        )


def _lowest(rows: Sequence[RunRow], preset: str) -> float:
    return min(row[row["axis"]] for row in rows if row["preset"] == preset)


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
