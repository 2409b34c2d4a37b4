"""Results grow piece by piece, and are whole at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import figures, results


def begun() -> dict[str, Any]:
    return results.begin({"commit": "abc"}, is_dry=True)


def test_a_piece_brings_its_figures_and_what_follows_from_all() -> None:
    switch = {"figures": {"8B_host_cached_switch_p50_s": figures.measured(0.5)}}
    sleep = {"figures": {"8B_sleep_and_wake_p50_s": figures.measured(2.0)}}
    one = results.with_piece(begun(), "switch-8B", results.DONE, seconds=3.0, report=switch)
    assert one["derived"] == {}
    both = results.with_piece(one, "sleep-8B", results.TIMED_OUT, report=sleep)
    assert list(both["pieces"]) == ["switch-8B", "sleep-8B"]
    assert results.figures_of(both).keys() == switch["figures"].keys() | sleep["figures"].keys()
    assert both["derived"]["8B_sleep_and_wake_over_switch_ratio"]["measured"] == 4.0
    assert both["commit"] == "abc"


def test_a_run_has_failed_when_a_piece_was_begun_and_did_not_end() -> None:
    unasked = results.with_piece(begun(), "a", results.NOT_ASKED_FOR)
    late = results.with_piece(unasked, "b", results.NO_TIME)
    assert not results.has_failed(late)
    assert results.has_failed(results.with_piece(late, "c", results.TIMED_OUT))
    assert results.has_failed(results.with_piece(late, "c", results.FAILED))


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.write(path, begun())
    grown = results.with_piece(begun(), "a", results.DONE)
    results.write(path, grown)
    assert json.loads(path.read_text()) == grown
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_the_table_names_what_failed_and_what_was_missed() -> None:
    report = {"figures": {"x_p50_s": figures.at_most(0.3, 0.2), "y_rps": figures.measured(4.0)}}
    grown = results.with_piece(
        begun(), "a", results.FAILED, seconds=2.0, problem="no memory", report=report
    )
    first, warning, missed, plain = results.table(grown)
    assert first.split() == ["a", "failed", "2.0", "s", "no", "memory"]
    assert "dry run" in warning
    assert missed.split() == ["x_p50_s", "300ms", "200ms", "MISSED"]
    assert plain.split() == ["y_rps", "4/s"]
