"""docs/performance.md is what the script writes from the files in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import figures, report, results
from gpupoold.errors import Refused
from tests import fake_card

FACTS: dict[str, Any] = {
    "commit": "0123abc",
    "started_at": "2027-01-15T10:00:00+00:00",
    "hardware": {
        "gpu": {
            "name": "NVIDIA H200",
            "memory_bytes": 141 << 30,
            "driver": "580.1",
            "pcie_generation": 5,
            "pcie_width": 16,
        },
        "cpu": "Some Processor",
        "cores": 16,
        "memory_bytes": 128 << 30,
    },
    "versions": {"torch": "2.11.0", "vllm": "0.32.0"},
}


def measured(*, is_dry: bool = False, **facts: Any) -> dict[str, Any]:
    found = {
        "8B_host_cached_switch_p50_s": figures.at_most(0.375, 0.5),
        "pinned_in_bytes_per_s": figures.measured(50 * (1 << 30)),
        "nobody_knows_this": figures.at_most(3, 2),
    }
    one = results.begin(FACTS | facts, is_dry=is_dry)
    one = results.with_piece(one, "switch-8B", results.DONE, report={"figures": found})
    return results.with_piece(one, "overhead", results.NO_TIME)


def test_the_page_in_the_repository_is_that_of_its_files() -> None:
    expected = report.page(report.load(report.RESULTS))
    assert report.PAGE.read_text("utf-8") == expected, "run python -m benchmarks.gpu.report"


def test_without_a_file_the_page_says_that_nothing_was_measured() -> None:
    page = report.page({})
    assert "Nothing has been measured on a GPU yet." in page
    assert "|" not in page


class TestPage:
    def test_every_figure_stands_beside_its_file(self) -> None:
        lines = report.page({"a.json": measured()}).splitlines()
        assert "| 1: [a](../benchmarks/results/a.json) at 0123abc | NVIDIA H200" in "".join(lines)
        assert "| `8B_host_cached_switch_p50_s` | 375ms | 500ms | yes | 1 |" in lines
        assert "| `pinned_in_bytes_per_s` | 50 GiB/s |  |  | 1 |" in lines
        assert "| `nobody_knows_this` | 3 | 2 | **no** | 1 |" in lines

    def test_every_figure_of_every_file_is_there_once(self) -> None:
        page = report.page({"a.json": measured(), "b.json": measured()})
        for name in results.figures_of(measured()):
            assert page.count(f"| `{name}` |") == 2

    def test_says_what_each_file_was_made_on_and_what_was_not_measured(self) -> None:
        page = report.page({"a.json": measured()})
        assert "NVIDIA H200, 141 GiB, PCIe 5 x16" in page
        assert "0123abc" in page
        unknown = {**FACTS["hardware"]["gpu"], "pcie_generation": None, "pcie_width": None}
        page = report.page({"a.json": measured(hardware={**FACTS["hardware"], "gpu": unknown})})
        assert "NVIDIA H200, 141 GiB |" in page
        assert "| overhead | no time left | 1 |" in page


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (measured(is_dry=True), "not measured on a GPU"),
        (measured(hardware={"gpu": None}), "not measured on a GPU"),
        (measured(hardware={"gpu": {"name": fake_card.NAME}}), "not measured on a GPU"),
        (measured() | {"format": 0}, "format 0"),
    ],
    ids=["dry", "no-gpu", "fake-card", "format"],
)
def test_files_of_no_gpu_are_refused(content: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(content))
    with pytest.raises(Refused, match=problem):
        report.load(tmp_path)
