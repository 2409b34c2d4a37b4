"""Plots of attainment against load, as in the papers; matplotlib is imported on first use."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpupoold.errors import UsageError
from gpupoold.sim.metrics import GOODPUT_ATTAINMENT
from gpupoold.sim.run import RunRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png")
_PANELS_PER_LINE = 4
_PANEL_INCHES = (4.6, 3.4)
_AXIS_LABELS = {"models": "models", "rps": "requests/s per model"}
# Colours and markers. The colours are Okabe and Ito's, distinguishable for colour-blind readers.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#E69F00", "D"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)


def check_plot(path: Path) -> None:
    """Raise UsageError unless a plot can be written to ``path``."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{path}: the file name of a plot must end in {' or '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", "pip install 'gpupool[plot]'")


def save_plot(rows: Sequence[RunRow], titles: Mapping[str, str], path: Path) -> None:
    """Draw a panel per preset, with ``titles`` by preset, and write the file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "gpupool", "font.size": 11}):
        figure = _draw(Figure(layout="constrained"), rows, titles)
        # No date, so that equal rows give equal files.
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _draw(figure: Figure, rows: Sequence[RunRow], titles: Mapping[str, str]) -> Figure:
    panels: dict[str, list[RunRow]] = {}
    for row in rows:
        panels.setdefault(row["preset"], []).append(row)
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    styles = {name: _STYLES[index % len(_STYLES)] for index, name in enumerate(policies)}
    across = min(len(panels), _PANELS_PER_LINE)
    down = math.ceil(len(panels) / across)
    figure.set_size_inches(across * _PANEL_INCHES[0], down * _PANEL_INCHES[1] + 0.5)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for spare in grid[len(panels) :]:
        spare.set_visible(False)
    for axes, (preset, shown) in zip(grid, panels.items(), strict=False):
        axes.set_title(f"{preset}\n{titles.get(preset, '')}", fontsize=10)
        _draw_panel(axes, shown, styles)
    for axes in grid[::across]:
        axes.set_ylabel("tokens in time, %")
    _legend(figure, styles, across)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[RunRow], styles: Mapping[str, tuple[str, str]]) -> None:
    served = [row for row in rows if row["attainment"] is not None]
    if len({row[row["axis"]] for row in rows}) > 1:
        _draw_lines(axes, served, styles)
        axes.set_xlabel(_AXIS_LABELS[rows[0]["axis"]])
    else:
        _draw_bars(axes, served, styles)
    axes.axhline(GOODPUT_ATTAINMENT * 100, color="0.4", linestyle="--", linewidth=1)
    axes.set_ylim(0, 104)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


def _draw_lines(axes: Axes, rows: Sequence[RunRow], styles: Mapping[str, tuple[str, str]]) -> None:
    for policy, (colour, marker) in styles.items():
        line = sorted(
            (row[row["axis"]], 100 * (row["attainment"] or 0.0))
            for row in rows
            if row["policy"] == policy
        )
        if line:
            axes.plot(*zip(*line, strict=True), color=colour, marker=marker, markersize=5)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=any(row["axis"] == "models" for row in rows))


def _draw_bars(axes: Axes, rows: Sequence[RunRow], styles: Mapping[str, tuple[str, str]]) -> None:
    """Draw a single load: a labelled bar per policy."""
    for position, row in enumerate(rows):
        height = 100 * (row["attainment"] or 0.0)
        axes.bar(position, height, color=styles[row["policy"]][0])
        axes.text(position, height / 2, f"{height:.1f}", ha="center", va="center", color="white")
    axes.set_xticks([])
    if rows:
        axes.set_xlabel(f"{rows[0]['models']} models, {rows[0]['rps']:.3g} requests/s each")


def _legend(figure: Figure, styles: Mapping[str, tuple[str, str]], across: int) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=5, label=policy)
        for policy, (colour, marker) in styles.items()
    ]
    columns = min(len(handles), 3 * across)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
