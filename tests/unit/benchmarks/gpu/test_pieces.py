"""How a run's time is shared out."""

from __future__ import annotations

import pytest

from benchmarks.gpu.pieces import PIECES, TESTS, Piece, allotted_s, chosen
from gpupoold.errors import UsageError

PIECE = Piece("a", ("module",), limit_s=100.0, least_s=30.0)


@pytest.mark.parametrize(
    ("left_s", "seconds"), [(480.0, 100.0), (78.0, 70.0), (38.0, 30.0), (37.0, None), (-5.0, None)]
)
def test_a_piece_gets_its_limit_or_what_is_left_or_is_not_begun(
    left_s: float, seconds: float | None
) -> None:
    assert allotted_s(PIECE, left_s) == seconds


def test_the_last_piece_need_not_leave_any_time() -> None:
    assert allotted_s(PIECE, 480.0, is_last=True) == 472.0
    assert allotted_s(PIECE, 37.0, is_last=True) is None


def test_tests_come_first_and_then_what_is_worth_most() -> None:
    names = [piece.name for piece in chosen([], is_dry=False)]
    assert names[:3] == ["tests", "switch-8B", "device"]
    assert len(set(names)) == len(names) == len(PIECES) + 1


def test_a_dry_run_leaves_out_what_differs_in_size_only() -> None:
    left_out = {*chosen([], is_dry=False)} - {*chosen([], is_dry=True)}
    modules = {piece.arguments[0] for piece in chosen([], is_dry=True)}
    assert left_out
    assert {piece.arguments[0] for piece in left_out} <= modules


def test_pieces_run_in_the_order_that_was_asked_for() -> None:
    names = ["device", "switch-1B", "tests"]
    assert [piece.name for piece in chosen(names, is_dry=True)] == names


def test_an_unknown_piece_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="'swtch'") as caught:
        chosen(["device", "swtch"], is_dry=False)
    assert "device" in caught.value.hint


def test_no_piece_can_get_less_than_the_least_it_wants() -> None:
    assert all(0 < piece.least_s <= piece.limit_s for piece in (TESTS, *PIECES))
