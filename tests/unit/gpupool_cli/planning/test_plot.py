"""Plots of simulated rows: what is in the picture, and that nothing else loads matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpupool_cli.planning.plot import check_plot, save_plot
from gpupoold.errors import UsageError
from gpupoold.sim.run import RunRow
from gpupoold.sim.scenario import Axis

TITLES = {"one": "the first", "two": "the second"}


def row(
    preset: str, policy: str, models: int, attainment: float | None, axis: Axis = "models"
) -> RunRow:
    return {
        "preset": preset, "policy": policy, "axis": axis, "devices": "4xA10",
        "tensor_parallel": 1, "models": models, "rps": models / 10, "ttft_s": 10.0, "tbt_s": 0.1,
        "seed": 0, "roles": "auto", "kv_host_bytes": 0, "model_cache_bytes": 0, "requests": 1,
        "finished": 1, "attainment": attainment, "attainment_bound": 1.0,
        "attainment_paper": attainment, "on_schedule": attainment,
        "ttft_attainment": attainment, "tbt_attainment": attainment, "ttft_p50_s": 1.0,
        "ttft_p99_s": 1.0, "tbt_p99_s": 0.1, "switches": 0, "busy_share": 0.5,
        "switching_share": 0.1, "disk_reads": 0, "kv_drops": 0, "wall_s": 0.1,
    }  # fmt: skip


ROWS = [
    row("one", "gpupool", 40, 1.0),
    row("one", "gpupool", 80, 0.9),
    row("one", "static", 40, 1.0),
    row("one", "static", 80, None),
    row("two", "gpupool", 4, 0.7, "rps"),
    row("two", "gpupool", 8, 0.6, "rps"),
]


def test_svg_has_panels_and_policies_and_repeats(tmp_path: Path) -> None:
    first, again = tmp_path / "a.svg", tmp_path / "b.svg"
    save_plot(ROWS, TITLES, first)
    save_plot(ROWS, TITLES, again)
    text = first.read_text()
    for said in ("one", "the second", "gpupool", "static", "requests/s per model", "models"):
        assert f"<!-- {said} -->" in text
    assert text == again.read_text()


def test_png_of_single_loads(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    single = [row("one", policy, 40, 0.5) for policy in ("gpupool", "static", "aegaeon")]
    save_plot(single, TITLES, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_panels_and_nothing_served(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    save_plot([row(f"p{n}", "static", 40, None) for n in range(6)], {}, path)
    assert path.read_text().count("<!-- p") == 6


def test_where_no_plot_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        check_plot(tmp_path / "a.jpg")
    with pytest.raises(UsageError, match="no folder"):
        check_plot(tmp_path / "missing" / "a.svg")
    (tmp_path / "b.svg").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        save_plot(ROWS, TITLES, tmp_path / "b.svg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install 'gpupool"):
        check_plot(tmp_path / "a.svg")


def test_the_command_line_does_not_load_matplotlib(project_env: dict[str, str]) -> None:
    probe = (
        "import sys, gpupool_cli.planning.plan, gpupool_cli.planning.simulate\n"
        "print({'matplotlib', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], env=project_env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
