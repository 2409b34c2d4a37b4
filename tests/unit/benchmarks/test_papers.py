"""Published figures beside ours: what the page claims, from few stored loads."""

from __future__ import annotations

import re

import pytest

from benchmarks import papers
from gpupoold.config.schema import parse_settings
from gpupoold.errors import ConfigError
from gpupoold.sim.policies import POLICY_NAMES
from tests.conftest import ROOT

LOADS = {"aegaeon": 47.0, "request-level-4": 65.0, "static": 40.0, "gpupool": 101.0}


def goodputs(**loads: float) -> dict[str, dict[str, object]]:
    return {name: {"load": load, "is_lower_bound": False} for name, load in loads.items()}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[papers.PaperFigure]:
    """Without the figures that need a simulation."""
    monkeypatch.setattr(papers, "_eight_models", lambda *_: None)
    monkeypatch.setattr(papers, "_burst_share", lambda _: None)
    monkeypatch.setattr(papers, "_best_fit_p99_s", lambda: (0.0002, 10))
    stored = {"aegaeon-fig13a": goodputs(**LOADS)}
    return papers.paper_figures([], stored, None)


def test_both_rivals_of_a_published_ratio_are_shown(figures: list[papers.PaperFigure]) -> None:
    shown = {one["quantity"]: one["ours"] for one in figures if one["figure"] == "13a"}
    assert shown["load at 90 % over request-level-4"] == "aegaeon 0.72 x, gpupool 1.55 x"
    assert shown["load at 90 % over static"] == "aegaeon 1.18 x, gpupool 2.52 x"


def test_a_group_without_measurements_has_no_figure(figures: list[papers.PaperFigure]) -> None:
    [row] = [one for one in figures if "Llama-2-70B" in one["quantity"]]
    assert (row["published"], row["ours"]) == ("2", "")
    assert row["why"] == "only groups of 4, 8 are measured; of these 4 is best"


def test_the_page_has_these_rows(figures: list[papers.PaperFigure]) -> None:
    page = (ROOT / "docs" / "internals" / "papers.md").read_text(encoding="utf-8")
    for one in figures:
        begin = f"| {one['figure']} | {one['quantity']} | {one['published']} |"
        assert begin in page


def test_the_daemon_accepts_the_policies_that_the_page_names() -> None:
    page = (ROOT / "docs" / "internals" / "scheduling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| (yes|no)[^|]* \| yes \|", page, re.MULTILINE)
    in_daemon = {name: there for names, there in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert set(in_daemon) == set(POLICY_NAMES)
    for name, there in in_daemon.items():
        raw = {"devices": ["emulated"], "scheduling": {"policy": name}}
        if there == "yes":
            assert parse_settings(raw, "test").scheduling.policy == name
        else:
            with pytest.raises(ConfigError):
                parse_settings(raw, "test")
