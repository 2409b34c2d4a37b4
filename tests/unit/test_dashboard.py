"""The Grafana dashboard is what Grafana can load: it cannot be had here, its rules are known."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tests.dashboard import dashboard, metric_names, queries

KINDS = {"row", "timeseries", "stat", "table"}
ROWS = ["Promises", "Models", "Devices", "Switches", "Caches", "Recoveries", "The daemon"]


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = dashboard()["panels"]
    return found


def test_it_is_a_dashboard_of_a_schema_that_grafana_reads() -> None:
    loaded = dashboard()
    assert (loaded["uid"], loaded["title"]) == ("gpupool", "gpupool")
    assert loaded["schemaVersion"] == 39
    assert "id" not in loaded, "Grafana gives it one"
    assert loaded["time"].keys() == {"from", "to"}


def test_panels_have_what_they_need(panels: list[dict[str, Any]]) -> None:
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        assert panel["type"] in KINDS
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["targets"]
            assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_do_not_overlap_and_stay_on_the_grid(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


def test_targets_have_names_and_take_the_chosen_data_source(panels: list[dict[str, Any]]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        references = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == chosen for target in panel.get("targets", []))
        assert panel["type"] == "row" or panel["datasource"] == chosen


def test_all_variables_are_defined() -> None:
    loaded = dashboard()
    defined = {variable["name"] for variable in loaded["templating"]["list"]}
    assert defined == {"datasource", "instance", "model", "device"}
    used = set(re.findall(r"\$\{?(\w+)", str(loaded["panels"])))
    assert used - {"__rate_interval"} == defined


def test_queries_leave_no_variable_and_read_some_metric() -> None:
    assert len(queries()) > 50
    for _, expression in queries():
        assert "$" not in expression
        assert metric_names(expression)
