"""Panels with changes: true titles, and models that fit."""

from __future__ import annotations

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.presets import poisson_panel, preset_panels
from gpupoold.sim.scenario import Overrides, changed_panel

A10S = Overrides(box=parse_box("2xA10"))


@pytest.mark.parametrize(
    ("wanted", "title"),
    [
        (Overrides(), "16xH800, 0.1 rps per model"),
        (Overrides(box=parse_box("2xL40S")), "2xL40S, 0.1 rps per model"),
        (Overrides(box=parse_box("2x4xH800")), "8xH800 in groups of 4, 0.1 rps per model"),
        (Overrides(models=(4,), rps=(0.5, 1.0)), "16xH800, 4 models"),
        (Overrides(models=(4, 8), rps=(0.5,)), "16xH800, 0.5 rps per model"),
        (Overrides(models=(4, 8), rps=(0.5, 1.0)), "16xH800"),
        (Overrides(tbt_s=0.05), "16xH800, 0.1 rps per model, TTFT 10s, TBT 50ms"),
    ],
)
def test_the_title_is_of_the_run(wanted: Overrides, title: str) -> None:
    assert changed_panel(poisson_panel(), wanted)[0].title == title


def test_a_preset_keeps_its_title_until_its_load_changes() -> None:
    (panel,) = preset_panels("aegaeon-fig12-ix2")
    assert changed_panel(panel, Overrides(seed=7, policies=("static",)))[0].title == panel.title
    changed = changed_panel(panel, Overrides(rps=(0.3,)))[0]
    assert changed.title == "16xH800, 0.3 rps per model"


def test_models_that_do_not_fit_are_left_out() -> None:
    panel, left_out = changed_panel(poisson_panel(), A10S)
    assert panel.shapes == ("Qwen2.5-7B", "Yi-1.5-9B")
    assert left_out == ["Llama-2-13B weighs 26 GB, one GPU of 2xA10 can hold 21.7 GB"]
    assert changed_panel(poisson_panel(), Overrides())[1] == []


def test_no_model_fits() -> None:
    (panel,) = preset_panels("aegaeon-fig17-72b")
    with pytest.raises(UsageError, match="Qwen-72B weighs"):
        changed_panel(panel, A10S)
