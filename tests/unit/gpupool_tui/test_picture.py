"""What adds up over the daemon's answers."""

from __future__ import annotations

from typing import cast

import pytest

from gpupool_tui.picture import ask
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import Top
from tests.unit.gpupool_tui.pictures import AT, picture, top


def test_turns_add_up_by_device() -> None:
    seen = picture()
    assert [turn.id for turn in seen.turns[0]] == [1, 3, 4, 7]
    assert [turn.id for turn in seen.turns_since(0, AT - 5.0)] == [4, 7]
    assert seen.turns_since(5, 0.0) == []


class Daemon:
    """Notes the questions; the process id of its answers is ``pid``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.asked: list[tuple[object, ...]] = []

    def top(self, turns_after: int, events_after: int, *, minutes: bool = True) -> Top:
        self.asked.append((turns_after, events_after, minutes))
        return top(1, pid=self.pid)


@pytest.mark.parametrize(
    ("pid", "asked"), [(4321, [(7, 4, False)]), (99, [(7, 4, False), (0, 4, True)])]
)
def test_only_what_is_new_is_asked_for(pid: int, asked: list[tuple[object, ...]]) -> None:
    daemon = Daemon(pid)
    answer = ask(cast("AdminClient", daemon), picture())
    assert daemon.asked == asked
    assert answer.status.pid == pid


def test_minutes_are_kept_while_answers_leave_them_out() -> None:
    seen = picture()
    bare = top(1)
    for model in bare.models:
        model.usage.attainment_minutes = []
    seen.add(bare)
    assert len(seen.minutes_of("coder")) == 60
    assert seen.minutes_of("nobody") == []


def test_another_daemon_has_other_turns() -> None:
    seen = picture()
    other = top(1, pid=99).model_copy(update={"turns": [], "events": []})
    assert seen.restarted(other)
    seen.add(other)
    assert seen.turns == {}
    assert len(seen.events) == 4
    assert not seen.restarted(other)
