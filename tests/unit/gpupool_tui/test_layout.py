"""How the lines of the screen are shared out."""

from __future__ import annotations

import pytest

from gpupool_tui.view import Panel, share_out, wishes


@pytest.mark.parametrize("num_devices", [0, 1, 2, 16])
@pytest.mark.parametrize("num_models", [0, 6, 100])
def test_all_lines_are_given_away_and_no_more(num_devices: int, num_models: int) -> None:
    for height in (*range(24), 48, 200):
        check(num_devices, num_models, height)


def check(num_devices: int, num_models: int, height: int) -> None:
    shared = share_out(wishes(num_devices, num_models, 20, 9), height, None)
    assert sum(shared.values()) == (height if shared else 0)
    assert list(shared) == sorted(shared, key=lambda panel: panel.value)
    if height >= 22:
        assert {Panel.DEVICES, Panel.LANES, Panel.MODELS} <= set(shared)
        assert all(lines >= 3 for lines in shared.values())


def test_a_small_screen_has_what_matters_most() -> None:
    assert set(share_out(wishes(2, 6, 9, 9), 8, None)) == {Panel.MODELS}
    assert set(share_out(wishes(2, 6, 9, 9), 10, None)) == {Panel.MODELS, Panel.DEVICES}


def test_a_large_screen_has_all_rows() -> None:
    shared = share_out(wishes(16, 30, 9, 9), 110, None)
    assert shared[Panel.DEVICES] == 18
    assert shared[Panel.LANES] == 18
    assert shared[Panel.MODELS] == 32


def test_a_maximised_panel_has_all_lines() -> None:
    assert share_out(wishes(2, 6, 9, 9), 22, Panel.EVENTS) == {Panel.EVENTS: 22}
