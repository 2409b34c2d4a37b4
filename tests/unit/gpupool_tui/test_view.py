"""What keys do to the view."""

from __future__ import annotations

import pytest

from gpupool_tui.view import INTERVALS_S, ZOOMS_S, Panel, View, first_zoom_s

ALL = frozenset(Panel)


def test_a_panel_is_jumped_to_then_maximised_then_put_back() -> None:
    view = View(focus=Panel.MODELS)
    view.go_to(Panel.DEVICES, ALL)
    assert (view.focus, view.maximised) == (Panel.DEVICES, None)
    view.go_to(Panel.DEVICES, ALL)
    assert view.maximised is Panel.DEVICES
    view.go_to(Panel.EVENTS, frozenset({Panel.DEVICES}))
    assert (view.focus, view.maximised) == (Panel.EVENTS, Panel.EVENTS)
    view.go_to(Panel.EVENTS, frozenset({Panel.EVENTS}))
    assert view.maximised is None


def test_a_panel_that_has_no_room_is_maximised_at_once() -> None:
    view = View()
    view.go_to(Panel.REQUESTS, ALL - {Panel.REQUESTS})
    assert view.maximised is Panel.REQUESTS


def test_steps_end_at_the_ends() -> None:
    view = View()
    for _ in range(20):
        view.zoom(1)
        view.change_interval(1)
    assert (view.zoom_s, view.interval_s) == (ZOOMS_S[-1], INTERVALS_S[-1])
    for _ in range(20):
        view.zoom(-1)
        view.change_interval(-1)
    assert (view.zoom_s, view.interval_s) == (ZOOMS_S[0], INTERVALS_S[0])


def test_a_value_between_the_steps_goes_to_the_next() -> None:
    view = View(interval_s=1.5)
    view.change_interval(1)
    assert view.interval_s == 2.0


@pytest.mark.parametrize(
    ("turns_s", "zoom_s"),
    [([], 0.5), ([9.0], 0.5), ([1.5, 0.2, 3.0], 0.25), ([0.25], 0.1), ([0.8, 0.8, 9.0], 0.1)],
)
def test_names_fit_into_half_of_the_turns_at_first(turns_s: list[float], zoom_s: float) -> None:
    assert first_zoom_s(turns_s) == zoom_s
