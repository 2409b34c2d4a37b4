"""Turns and switches on a line of time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from gpupool_tui.lanes import axis, colour_of, draw_lane
from gpupool_tui.picture import Picture
from gpupool_tui.text import ASCII, plain, width_of
from gpupoold.api.schemas import DeviceInfo, Top, TurnInfo
from tests.unit.gpupool_tui.pictures import AT, device, top, turn

IDLE = device(0, on_turn=None, quota_used_s=0.0)


def seen(turns: list[TurnInfo], now: DeviceInfo = IDLE, at: float = AT) -> Picture:
    return Picture(answer(turns, now, at))


def answer(turns: list[TurnInfo], now: DeviceInfo = IDLE, at: float = AT) -> Top:
    return top().model_copy(update={"turns": turns, "devices": [now], "at": at})


def lane(picture: Picture, width: int = 20, zoom_s: float = 1.0) -> str:
    [now] = picture.latest.devices
    drawn = draw_lane(picture.cells(now, zoom_s, width), ASCII)
    assert width_of(drawn.line) == width
    return plain(drawn.line)


def test_a_switch_and_its_turn_end_where_they_ended() -> None:
    assert lane(seen([turn(1, 0, "qwen", 10.0, 8.0, switch_s=3.0)])) == ".......%%%qwen 8s=.."


def test_a_long_switch_says_what_it_took() -> None:
    assert lane(seen([turn(1, 0, "q", 10.0, 8.0, switch_s=6.0)])) == "....%6s%%%q 8s====.."


def test_short_runs_have_no_name() -> None:
    turns = [turn(1, 0, "qwen", 10.0, 2.0, 0.0), turn(2, 0, "qwen", 7.0, 4.0, 0.0)]
    assert lane(seen(turns)) == "..........==.qw…=..."


def test_a_cell_belongs_to_what_took_most_of_it() -> None:
    turns = [turn(1, 0, "a", 5.0, 0.3, 0.0), turn(2, 0, "b", 4.6, 0.05, 0.5)]
    assert lane(seen(turns), 8) == "...%...."
    assert lane(seen([turn(1, 0, "a", 5.0, 0.05, 0.0)]), 8) == "........"


def test_the_turn_under_way_grows_and_its_switch_before_it() -> None:
    before = turn(1, 0, "a", 12.0, 4.0, 0.0)
    runs = device(0, on_turn="b", quota_used_s=5.0)
    assert lane(seen([before], runs)) == "........a===...b 5s="
    comes = device(0, on_turn="b", quota_used_s=0.0)
    assert lane(seen([before], comes)) == "........a===%8s%%%%%"


def test_what_has_been_drawn_only_moves() -> None:
    picture = seen([turn(1, 0, "qwen", 10.0, 8.0, switch_s=3.0)])
    shown = [lane(picture)]
    for number in range(1, 6):
        picture.add(answer([], IDLE, AT + number))
        shown.append(lane(picture))
    assert all(later == earlier[1:] + "." for earlier, later in pairwise(shown))


def test_cells_kept_are_those_worked_out_anew() -> None:
    picture = seen([])
    turns: list[TurnInfo] = []
    for number in range(60):
        at = AT + 0.7 * number
        new = turn(number + 1, 0, f"m{number % 3}", 0.55 - 0.7 * number, 0.4, 0.1)
        turns.append(new)
        now = device(0, on_turn="m1", quota_used_s=0.1)
        picture.add(answer([new], now, at))
        for zoom_s in (0.25, 1.0):
            assert lane(picture, 40, zoom_s) == lane(seen(turns, now, at), 40, zoom_s)


def test_share_of_switches() -> None:
    picture = seen([turn(1, 0, "q", 10.0, 8.0, switch_s=5.0)])
    drawn = draw_lane(picture.cells(IDLE, 1.0, 20), ASCII)
    assert drawn.switch_share == 0.25


def test_a_turn_that_did_not_run_is_only_a_switch() -> None:
    vain = replace(turn(1, 0, "q", 5.0, 0.0, switch_s=3.0), did_run=False)
    assert lane(seen([vain]), 10) == "..%%%....."


def test_axis_ends_now() -> None:
    drawn = axis(0.5, 60, ASCII)
    assert len(drawn) == 60
    assert drawn.endswith("now")
    assert drawn[40] == "+"
    assert drawn[41:45] == "-10s"
    assert len(axis(1.0, 5, ASCII)) == 5


def test_a_model_has_one_colour() -> None:
    assert colour_of("qwen") == colour_of("qwen")
    assert len({colour_of(f"model-{number}") for number in range(50)}) == 8
