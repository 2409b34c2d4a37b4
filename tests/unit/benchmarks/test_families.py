"""docs/models.md is what the results say, and tells failures from what vLLM cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.families.cells import COLUMNS, Cell, Outcome, Row, read_rows, write_rows
from benchmarks.families.make import TEMPLATES
from benchmarks.families.page import page_text
from benchmarks.families.table import FAMILIES, family_named
from benchmarks.families.transformers_backend import TRANSFORMERS_BACKEND
from benchmarks.models import PAGE, RESULTS, current_page, group_results

# Families that have not been tried on groups.
UNTRIED = {group_results(2): {one.name for one in TRANSFORMERS_BACKEND} | {"lfm2-moe"}}

YES = Cell(Outcome.YES, "")


def row(**cells: Cell) -> Row:
    return Row(cells=dict.fromkeys(COLUMNS, YES) | cells, measured_on="2026-11-24", wall_s=1.0)


def test_the_page_is_generated_from_the_results() -> None:
    assert PAGE.read_text() == current_page()


@pytest.mark.parametrize("results", [RESULTS, group_results(2)], ids=lambda path: path.stem)
def test_every_family_has_results(results: Path) -> None:
    rows, known = set(read_rows(results)), {family.name for family in FAMILIES}
    assert rows <= known
    assert known - rows <= UNTRIED.get(results, set())


def test_groups_have_a_table_without_parsers() -> None:
    bad = row(serve=Cell(Outcome.NO, "token 3 differs"))
    page = page_text([family_named("gpt2")], {"gpt2": row()}, {2: {"gpt2": bad}})
    single, _, group = page.partition("## On groups of 2 GPUs")
    assert " parsers |" in single
    assert "token 3 differs" not in single
    assert " parsers |" not in group
    assert "## On groups of 2 GPUs: not right yet\n\n- GPT-2, serve: `token 3 differs`" in page


def test_names_are_unique_and_templates_exist() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    named = [family for family in FAMILIES if family.template]
    assert named
    assert all((TEMPLATES / f"{family.template}.jinja").exists() for family in named)


def test_failures_are_listed_with_their_columns() -> None:
    bad = Cell(Outcome.NO, "token 3 differs")
    page = page_text([family_named("gpt2")], {"gpt2": row(kv=bad, migrate=bad)}, {})
    assert "- GPT-2, KV, migrate: `token 3 differs`" in page
    assert "| **no**: KV, migrate |" in page
    assert "What vLLM cannot" not in page


def test_what_vllm_cannot_is_for_a_gpu() -> None:
    cannot = row(serve=Cell(Outcome.VLLM_CANNOT, "no `kernel`"))
    assert not cannot.has_failed
    page = page_text([family_named("gpt2")], {"gpt2": cannot}, {})
    assert "## What vLLM cannot\n\n- GPT-2, serve: `no 'kernel'`" in page


def test_figures_of_equal_checks_are_left_out_and_notes_are_not() -> None:
    checked = row(
        serve=Cell(Outcome.YES, "one request at a time"),
        kv=Cell(Outcome.YES, "192 KiB"),
        parsers=Cell(Outcome.UNTRIED, "no template at hand"),
    )
    page = page_text([family_named("gpt2"), family_named("bert")], {"gpt2": checked}, {})
    assert "| GPT-2 | dense | one request at a time |  |" in page
    page = page_text([family_named("gpt2")], {"gpt2": row(kv=Cell(Outcome.UNTRIED))}, {})
    assert "| GPT-2 | dense | all |" in page


def test_results_survive_writing(tmp_path: Path) -> None:
    rows = {"gpt2": row(serve=Cell(Outcome.NO, "é"))}
    write_rows(tmp_path / "rows.json", rows)
    assert read_rows(tmp_path / "rows.json") == rows
    assert json.loads((tmp_path / "rows.json").read_text())["gpt2"]["cells"]["kv"]["outcome"]
    assert read_rows(tmp_path / "absent.json") == {}
