"""Lines of spans: widths in cells, cutting, padding, what comes from outside."""

from __future__ import annotations

import pytest

from gpupool_tui.text import Span, as_ascii, cell_len, fit, fit_line, plain, width_of


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("abc", 5, "abc  "),
        ("abc", 3, "abc"),
        ("abcdef", 4, "abc…"),
        ("abc", 1, "…"),
        ("abc", 0, ""),
        ("コーダー", 8, "コーダー"),
        ("コーダー", 7, "コーダ…"),
        ("コーダー", 6, "コー …"),
        ("コ", 4, "コ  "),
    ],
)
def test_fit(text: str, width: int, expected: str) -> None:
    assert fit(text, width) == expected
    assert cell_len(fit(text, width)) == width


def test_fit_to_the_right() -> None:
    assert fit("7", 3, right=True) == "  7"
    assert fit("1234", 3, right=True) == "12…"


@pytest.mark.parametrize("width", range(14))
def test_a_line_has_exactly_its_width(width: int) -> None:
    line = fit_line((Span("ab", "x"), Span("コー"), Span("   "), Span("z", "y")), width)
    assert width_of(line) == width


def test_blanks_that_do_not_fit_leave_no_ellipsis() -> None:
    assert plain(fit_line((Span("ab"), Span("    ")), 4)) == "ab"
    assert plain(fit_line((Span("ab"), Span("cdef")), 4)) == "abc…"


def test_ascii_keeps_every_cell() -> None:
    line = (Span("ab…", "x"), Span("コ│"))
    assert as_ascii(line) == (Span("ab~", "x"), Span("???"))
    assert width_of(as_ascii(line)) == width_of(line)
