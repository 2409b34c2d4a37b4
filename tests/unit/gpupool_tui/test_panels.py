"""Colours of models: the share of tokens in time decides, not a percentile."""

from __future__ import annotations

import pytest

from gpupool_tui.panels import columns, pause_notes
from gpupool_tui.text import UNICODE, Line
from gpupool_tui.view import View
from gpupoold.api.schemas import TopModel
from tests.unit.gpupool_tui.pictures import model, picture


def cell(one: TopModel, key: str) -> Line:
    [column] = [column for column in columns(picture()) if column.key == key]
    return column.cell(one, View(UNICODE), column.width)


@pytest.mark.parametrize(
    ("attainment", "is_bad"), [(1.0, False), (0.9, False), (None, False), (0.89, True)]
)
@pytest.mark.parametrize("key", ["tbt", "ttft"])
def test_a_percentile_above_the_target_is_red_with_late_tokens_only(
    attainment: float | None, is_bad: bool, key: str
) -> None:
    one = model("m", tbt_p50_s=0.02, tbt_p99_s=1.0, ttft_p99_s=9.0, attainment_1h=attainment)
    line = cell(one, key)
    assert (line[-1].style == "bad") == is_bad
    assert line[-1].text.endswith("!") == is_bad
    is_harmless = not is_bad
    assert bool(pause_notes([model("n"), one])) == is_harmless


def test_no_note_without_pauses() -> None:
    assert pause_notes([model("m", tbt_p99_s=0.04)]) == []
