"""One family of each mechanism, in one group: everything that `make models-table` checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.families.cells import Cell, Outcome
from benchmarks.families.checks import GroupCheck
from benchmarks.families.make import make_family
from benchmarks.families.plain import PlainVllm
from benchmarks.families.table import family_named
from tests.conftest import ROOT

FAMILIES = ("mistral-window", "granite4", "deepseek-v2", "qwen3-moe")
COLUMNS = ("serve", "switch", "kv", "migrate", "resume")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Cell]]]:
    """The results of all families."""
    folder, logs = ROOT / "build" / "families", tmp_path_factory.mktemp("logs")
    folder.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {name: make_family(family_named(name), folder) for name in FAMILIES}
    with PlainVllm(logs / "plain.log") as plain:
        check = GroupCheck({family_named(name): path for name, path in paths.items()}, plain)
        check.run(logs / "group.log")
        yield check.cells


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_equals_vllm_alone(
    cells: dict[str, dict[str, Cell]], name: str, column: str
) -> None:
    cell = cells[name][column]
    assert cell.outcome is Outcome.YES, cell.text
