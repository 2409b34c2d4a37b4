"""Tables: which columns fit, which rows are shown, in what order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpupool_tui.table import (
    TableColumn,
    draw_table,
    fit_columns,
    next_sorting,
    or_last,
    or_least,
    sort_rows,
    window,
)
from gpupool_tui.text import ASCII, Span, plain, width_of
from gpupool_tui.view import Sorting, View


@dataclass(frozen=True)
class Row:
    name: str
    size: int | None


COLUMNS: tuple[TableColumn[Row], ...] = (
    TableColumn("name", "NAME", 4, lambda r, v, w: (Span(r.name),), lambda r: r.name, grows=6),
    TableColumn(
        "size",
        "SIZE",
        4,
        lambda r, v, w: (Span(str(r.size)),),
        lambda r: or_least(r.size),
        descends=True,
        right=True,
    ),
    TableColumn("note", "NOTE", 6, lambda r, v, w: (Span("長い"),), rank=1),
)
ROWS = [Row("b", 3), Row("a", None), Row("c", 12)]
VIEW = View(ASCII)


def drawn(width: int, height: int, selected: str | None = None) -> list[str]:
    found = draw_table(
        COLUMNS, ROWS, [r.name for r in ROWS], VIEW, Sorting("name"), selected, width, height
    )
    assert len(found.lines) == height
    assert all(width_of(line) == width for line in found.lines)
    return [plain(line) for line in found.lines]


def test_a_table() -> None:
    assert drawn(24, 5) == [
        " NAME^      SIZE NOTE",
        " b             3 長い",
        " a          None 長い",
        " c            12 長い",
        "",
    ]


def test_the_selected_row_is_marked_and_kept_in_sight() -> None:
    assert drawn(24, 2, "c")[1] == ">c            12 長い"
    assert drawn(24, 3, "a")[1:] == [" b             3 長い", ">a          None 長い"]


def test_columns_of_higher_rank_go_first_and_are_named() -> None:
    chosen, left_out = fit_columns(COLUMNS, 12)
    assert [column.key for column, _ in chosen] == ["name", "size"]
    assert [width for _, width in chosen] == [7, 4]
    assert left_out == ["NOTE"]


def test_columns_grow_as_far_as_they_may() -> None:
    chosen, left_out = fit_columns(COLUMNS, 60)
    assert ([width for _, width in chosen], left_out) == ([10, 4, 6], [])


@pytest.mark.parametrize("width", range(1, 30))
def test_any_width_can_be_drawn(width: int) -> None:
    drawn(width, 3)


def names(sorting: Sorting) -> str:
    return "".join(row.name for row in sort_rows(ROWS, COLUMNS, sorting))


def test_sorting() -> None:
    assert names(Sorting("name")) == "abc"
    assert names(Sorting("name", True)) == "cba"
    assert names(Sorting("size")) == "cba"
    assert names(Sorting("size", True)) == "abc"
    assert names(Sorting("note")) == names(Sorting("gone")) == "bac"


def test_what_is_not_known_is_last_in_either_kind_of_column() -> None:
    assert sorted([None, 2.0, 1.0], key=or_last) == [1.0, 2.0, None]
    assert sorted([None, 2.0, 1.0], key=or_least, reverse=True) == [2.0, 1.0, None]


def test_sorting_goes_round_the_columns_that_can_be_sorted_by() -> None:
    assert next_sorting(COLUMNS, Sorting("name"), 1).column == "size"
    assert next_sorting(COLUMNS, Sorting("size"), 1).column == "name"
    assert next_sorting(COLUMNS, Sorting("name", True), -1) == Sorting("size")


def test_windows() -> None:
    assert window(3, 5, 0) == range(3)
    assert window(10, 4, 0) == range(4)
    assert window(10, 4, 5) == range(3, 7)
    assert window(10, 4, 9) == range(6, 10)
    assert window(10, 4, 0, at_end=True) == range(6, 10)
    assert window(10, 0, 3) == range(3, 3)
