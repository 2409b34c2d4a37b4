"""Tables of ``make bench-sim`` in the pages: right numbers in, everything else as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sim_tables import TABLES, rewritten, table
from gpupoold.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def row(preset: str, policy: str, attainment: float | None, **others: object) -> dict[str, Any]:
    usual = {
        "preset": preset,
        "policy": policy,
        "axis": "models",
        "devices": "16xH800",
        "models": 40,
        "rps": 0.1,
        "attainment": attainment,
        "attainment_bound": 0.999,
        "attainment_paper": None if attainment is None else attainment - 0.01,
        "ttft_attainment": None if attainment is None else attainment + 0.01,
        "ttft_p50_s": 1.234,
        "ttft_p99_s": None,
        "switches": 7,
    }
    return usual | others


REPORT: dict[str, Any] = {
    "sweep": [
        {
            "draws": "judged on",
            "num_draws": 100,
            "num_losses": 3,
            "worst_points": 1.25,
            "attainment": {"gpupool": 0.8, "aegaeon": 0.4, "best-fit": None},
        }
    ],
    "figures": [
        {"figure": "models", "asked": "65 to 80", "measured": 77.123456, "reached": True},
        {"figure": "losses", "asked": 0, "measured": 2, "reached": False},
    ],
    "goodput": {
        "aegaeon-fig11a": {
            "aegaeon": {"load": 77.6, "is_lower_bound": False},
            "gpupool": {"load": 180.0, "is_lower_bound": True},
            "static": None,
        },
        "aegaeon-fig11c": {"aegaeon": {"load": 0.456, "is_lower_bound": False}},
    },
    "papers": [
        {
            "paper": "Aegaeon",
            "figure": "4",
            "quantity": "models in use",
            "published": "46.55",
            "ours": "46.1",
            "why": "",
        },
        {
            "paper": "Prism",
            "figure": "12",
            "quantity": "GPUs for 58 models",
            "published": "16",
            "ours": "",
            "why": "the requests are not public",
        },
    ],
    "rows": [
        row("small-box", "gpupool", 0.967, devices="4xA10", models=7, rps=0.18),
        row("small-box", "static", None, models=7, rps=0.18, refused="too many"),
        row("prism-overload", "gpupool", 0.8, devices="1xA100-80", models=1, rps=7.0),
        row("aegaeon-fig6", "decode-first", 0.5),
        row("aegaeon-fig11a", "aegaeon", 0.9, models=60),
        row("aegaeon-fig11a", "aegaeon", 1.0),
        row("aegaeon-fig11a", "gpupool", 1.0),
        row("aegaeon-fig11a", "static", None, models=60, refused="too many"),
        row("aegaeon-fig11c", "aegaeon", 1.0, axis="rps"),
        row("arena27", "static", 0.95, devices="3xH800", models=22),
        row("arena27", "gpupool", 0.9, devices="3xH800", models=22),
    ],
}


def lines(name: str) -> list[str]:
    return table(name, REPORT).splitlines()


def test_figures() -> None:
    assert lines("figures")[2:] == [
        "| models | 65 to 80 | 77.12 |  |",
        "| losses | 0 | 2 | missed |",
    ]


def test_goodput_tells_lower_bounds_and_loads_that_were_all_too_much() -> None:
    assert lines("goodput") == [
        "| preset | load in | gpupool | aegaeon | static |",
        "| - | - | - | - | - |",
        "| `aegaeon-fig11a` | models | ≥ 180 | 78 | none |",
        "| `aegaeon-fig11c` | rps |  | 0.46 |  |",
    ]


def test_recorded_workloads() -> None:
    assert lines("recorded")[0] == "| workload | box | models | gpupool | static | bound |"
    assert lines("recorded")[2:] == ["| `arena27` | 3xH800 | 22 | 90.0 % | 95.0 % | 99.9 % |"]


def test_small_tables() -> None:
    assert lines("fig6")[2:] == ["| `decode-first` | 50.0 % | 1.23 s | none | 7 |"]
    assert table("recorded", REPORT | {"rows": []}).startswith("Not measured")


def test_only_what_is_between_the_marks_changes() -> None:
    page = "before\n<!-- bench-sim: fig6 -->\nold\n<!-- end -->\nafter <!-- end -->\n"
    once = rewritten(page, REPORT)
    assert once.startswith("before\n<!-- bench-sim: fig6 -->\n\n| policy |")
    assert once.endswith("|\n\n<!-- end -->\nafter <!-- end -->\n")
    assert "old" not in once
    assert rewritten(once, REPORT) == once


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("<!-- bench-sim: fig6 -->\n", "1 tables begin in the page, 0 of them end"),
        ("<!-- bench-sim: fig99 -->\n<!-- end -->", "no table is named 'fig99'; known: figures"),
        ("<!-- bench-sim: fig6 -->\n<!-- bench-sim: figures -->\n<!-- end -->", "2 tables begin"),
    ],
)
def test_a_page_that_makes_no_sense(page: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        rewritten(page, REPORT)


def test_other_presets_have_first_tokens_beside_tokens() -> None:
    first, second = lines("others")[2:]
    assert first.startswith("| `small-box` | 4xA10 | 0.18 | 96.7 %, 97.7 % | refused |")
    assert second.startswith("| `prism-overload` | 1xA100-80 | 7 | 80.0 %, 81.0 % |  |")


def test_a_paper_has_its_own_figures() -> None:
    assert lines("papers-aegaeon")[2:] == ["| 4 | models in use | 46.55 | 46.1 |  |"]
    [prism] = lines("papers-prism")[2:]
    assert prism == "| 12 | GPUs for 58 models | 16 | - | the requests are not public |"
    assert lines("papers-aladdin")[2:] == []


def test_a_report_that_lacks_something() -> None:
    with pytest.raises(UsageError, match="the report has no 'goodput', which the table 'goodput'"):
        table("goodput", {"rows": []})


def test_the_command(tmp_path: Path) -> None:
    report, page = tmp_path / "bench.json", tmp_path / "scheduling.md"
    report.write_text(json.dumps(REPORT), "utf-8")
    page.write_bytes((ROOT / "docs" / "internals" / "scheduling.md").read_bytes())
    command = [sys.executable, "-m", "benchmarks.sim_tables", str(report), "--page", str(page)]
    told = [
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert [line.split()[-1] for line in told] == ["rewritten", "unchanged"]
    assert "| `arena27` | 3xH800 | 22 | 90.0 % | 95.0 % | 99.9 % |" in page.read_text("utf-8")
    assert "| judged on | 100 | 3 | 1.2 | 80.0 % | 40.0 % |  |" in page.read_text("utf-8")
    report.write_text("{", "utf-8")
    failed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)


def test_the_pages_have_every_table() -> None:
    pages = (
        ROOT / "docs" / "internals" / "scheduling.md",
        ROOT / "docs" / "internals" / "papers.md",
    )
    page = "".join(one.read_text("utf-8") for one in pages)
    assert [name for name in TABLES if f"<!-- bench-sim: {name} -->" not in page] == []
