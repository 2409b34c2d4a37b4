"""Bars and sparklines."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gpupool_tui.panels import cells_of, gauge, memory_bar, sparkline
from gpupool_tui.text import ASCII, UNICODE, plain, width_of


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=4), st.floats(0.1, 50), st.integers(0, 60)
)
def test_parts_fill_their_cells(parts: list[int], more: float, width: int) -> None:
    whole = sum(parts) + more
    counts = cells_of(parts, whole, width)
    assert sum(counts) <= width
    if width >= len(parts):
        assert all((number > 0) == (part > 0) for number, part in zip(counts, parts, strict=True))
        assert all(
            abs(number - part / whole * width) < len(parts) + 1
            for number, part in zip(counts, parts, strict=True)
        )


def test_memory_is_split_as_it_is() -> None:
    bar = memory_bar(12, 4, 4, 4, 20, 20, ASCII)
    assert plain(bar) == "########++++====...."
    assert [style for _, style in bar] == ["weights", "prefetched", "kv", "free"]


def test_memory_that_nobody_accounts_for_is_shown_as_such() -> None:
    assert plain(memory_bar(5, 0, 0, 5, 20, 20, ASCII)) == "#####??????????....."


def test_a_little_is_seen_and_all_is_full() -> None:
    assert plain(memory_bar(1, 0, 1, 998, 1000, 10, ASCII)) == "#=........"
    assert plain(memory_bar(10, 0, 0, 0, 10, 10, ASCII)) == "##########"


def test_a_device_that_is_not_up_has_no_bar() -> None:
    assert width_of(memory_bar(0, 0, 0, 0, 0, 10, UNICODE)) == 10
    assert plain(memory_bar(0, 0, 0, 0, 0, 10, UNICODE)) == ""


def test_gauge() -> None:
    assert plain(gauge(0.5, 6, ASCII)) == "===---"
    assert plain(gauge(7.0, 6, ASCII)) == "======"
    assert plain(gauge(0.0, 6, ASCII)) == "------"


def test_sparkline_levels_tell_what_is_near_all_apart() -> None:
    shares = [0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]
    assert sparkline(shares, 8, UNICODE) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.4, None, 1.0], 3, ASCII) == "_ #"


def test_sparkline_keeps_the_newest_to_the_right() -> None:
    assert sparkline([1.0], 4, UNICODE) == "···█"
    assert sparkline([], 4, UNICODE) == "····"
    # Seven values in three cells: groups of three from the right.
    assert sparkline([0.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5], 3, UNICODE) == "▁█▂"
    assert sparkline([None] * 59 + [1.0], 20, UNICODE) == "·" * 19 + "█"
