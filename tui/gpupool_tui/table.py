"""Tables of text: choice of columns and rows, and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gpupool_tui.text import NOTHING, Line, Span, fit, fit_line, restyled, width_of
from gpupool_tui.view import Sorting, View
from gpupoold.units import clean

Row = TypeVar("Row")
GAP = 1
_LAST = (1, 0.0)


@dataclass(frozen=True, slots=True)
class TableColumn(Generic[Row]):
    """A column of ``width`` cells, or more if ``grows``.

    ``cell`` takes a row, the view and the width, and may return less. Columns with a higher
    ``rank`` are left out first. ``order`` is the sort key, largest first if ``descends``; without
    ``order`` the column is not sortable.
    """

    key: str
    title: str
    width: int
    cell: Callable[[Row, View, int], Line]
    order: Callable[[Row], Any] | None = None
    descends: bool = False
    right: bool = False
    rank: int = 0
    grows: int = 0
    """Largest number of additional cells."""


def plain(text: Callable[[Row], str], style: str = "") -> Callable[[Row, View, int], Line]:
    return lambda row, view, width: (Span(clean(text(row)), style),)


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table's lines, its header first; the keys of the shown rows; omitted columns."""

    lines: list[Line]
    keys: list[str]
    left_out: list[str]


def or_last(value: float | None) -> tuple[int, float]:
    """Return an ``order`` in which unknown values come last, ascending."""
    return _LAST if value is None else (0, value)


def or_least(value: float | None) -> tuple[int, float]:
    """Return an ``order`` in which unknown values come last, descending."""
    return (-1, 0.0) if value is None else (0, value)


def figure(
    key: str,
    title: str,
    width: int,
    value: Callable[[Row], float | None],
    form: Callable[[Any], str] = str,
    rank: int = 0,
    *,
    style: str = "",
    zero: str = "",
    descends: bool = True,
) -> TableColumn[Row]:
    """Return a column of numbers in a ``style``, 0 in another; unknown numbers are a dim mark."""

    def cell(row: Row, view: View, width: int) -> Line:
        number = value(row)
        if number is None:
            return (Span(NOTHING, "dim"),)
        return (Span(form(number), style if number else zero),)

    return TableColumn(
        key, title, width, cell, lambda row: or_least(value(row)), descends, True, rank
    )


def fit_columns(
    columns: Sequence[TableColumn[Row]], width: int
) -> tuple[list[tuple[TableColumn[Row], int]], list[str]]:
    """Return the fitting columns with their widths, and the titles of the others."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(column.width + GAP for column in chosen) - GAP > width:
        chosen.remove(max(reversed(chosen), key=lambda column: column.rank))
    spare = width - (sum(column.width + GAP for column in chosen) - GAP)
    widths = {column.key: column.width for column in chosen}
    growing = [column for column in chosen if column.grows]
    while spare > 0 and growing:
        for one in list(growing):
            if spare > 0:
                widths[one.key] += 1
                spare -= 1
            if widths[one.key] >= one.width + one.grows:
                growing.remove(one)
    left_out = [column.title for column in columns if column not in chosen]
    return [(column, widths[column.key]) for column in chosen], left_out


def sort_rows(
    rows: Sequence[Row], columns: Sequence[TableColumn[Row]], sorting: Sorting | None
) -> list[Row]:
    column = next((column for column in columns if sorting and column.key == sorting.column), None)
    if column is None or column.order is None or sorting is None:
        return list(rows)
    return sorted(rows, key=column.order, reverse=column.descends != sorting.is_reversed)


def next_sorting(columns: Sequence[TableColumn[Row]], sorting: Sorting, step: int) -> Sorting:
    """Return the sorting by the previous or next sortable column."""
    keys = [column.key for column in columns if column.order is not None]
    index = keys.index(sorting.column) if sorting.column in keys else 0
    return Sorting(keys[(index + step) % len(keys)])


def window(num_rows: int, height: int, selected: int, *, at_end: bool = False) -> range:
    """Return the visible rows, including the selected one, in the middle if possible."""
    if num_rows <= height:
        return range(num_rows)
    start = num_rows - height if at_end else min(max(0, selected - height // 2), num_rows - height)
    return range(start, start + height)


def draw_table(
    columns: Sequence[TableColumn[Row]],
    rows: Sequence[Row],
    keys: Sequence[str],
    view: View,
    sorting: Sorting | None,
    selected: str | None,
    width: int,
    height: int,
    *,
    at_end: bool = False,
) -> DrawnTable:
    """Return ``height`` lines of ``width`` cells: a header and sorted rows with their ``keys``."""
    fitted, left_out = fit_columns(columns, width - 1)
    index = keys.index(selected) if selected in keys else (len(keys) - 1 if at_end else 0)
    shown = window(len(rows), height - 1, index, at_end=at_end and selected not in keys)
    lines = [fit_line(_header(fitted, view, sorting), width)]
    for number in shown:
        is_selected = keys[number] == selected
        mark = Span(view.glyphs.cursor if is_selected else " ", "cursor" if is_selected else "")
        line = fit_line((mark, *_cells(fitted, rows[number], view)), width)
        lines.append(restyled(line, "selected") if is_selected else line)
    lines += [(Span(" " * width),)] * (height - len(lines))
    return DrawnTable(lines[:height], [keys[number] for number in shown], left_out)


def _header(
    fitted: Sequence[tuple[TableColumn[Row], int]], view: View, sorting: Sorting | None
) -> list[Span]:
    spans = [Span(" ")]
    for column, width in fitted:
        style, mark = "header", " "
        if sorting is not None and column.key == sorting.column:
            descends = column.descends != sorting.is_reversed
            style, mark = "header sorted", view.glyphs.down if descends else view.glyphs.up
        title = fit(column.title, width, right=column.right)
        if column.right:
            spans += [Span(title, style), Span(mark, style)]
        else:
            name = title.rstrip()
            spans += [Span(name, style), Span(mark, style), Span(" " * (width - len(name)))]
    return spans


def _cells(fitted: Sequence[tuple[TableColumn[Row], int]], row: Row, view: View) -> list[Span]:
    spans: list[Span] = []
    for column, width in fitted:
        cell = column.cell(row, view, width)
        if column.right and (pad := width - width_of(cell)) > 0:
            spans.append(Span(" " * pad))
            spans += cell
        else:
            spans += fit_line(cell, width)
        spans.append(Span(" " * GAP))
    return spans
