"""Virtual time: order of events, cancellation, no way back."""

from __future__ import annotations

import math

import pytest

from gpupoold.sim.clock import EventPriority, EventQueue


def drain(queue: EventQueue[str]) -> list[tuple[float, str]]:
    popped = []
    while (next_event := queue.pop()) is not None:
        popped.append((queue.now_s, next_event.event))
    return popped


def test_events_come_in_order_of_time_and_move_the_clock() -> None:
    queue: EventQueue[str] = EventQueue()
    for at_s in (3.0, 1.0, 2.0):
        queue.schedule(at_s, f"at {at_s:g}")
    assert queue.now_s == 0
    assert queue.next_at_s == 1.0
    assert drain(queue) == [(1.0, "at 1"), (2.0, "at 2"), (3.0, "at 3")]
    assert queue.next_at_s is None
    assert queue.now_s == 3.0


def test_of_equal_times_the_priority_class_decides_then_the_order_of_scheduling() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.schedule(1.0, "arrival a", EventPriority.ARRIVAL)
    queue.schedule(1.0, "step ended", EventPriority.COMPLETION)
    queue.schedule(1.0, "arrival b", EventPriority.ARRIVAL)
    queue.schedule(0.5, "early arrival", EventPriority.ARRIVAL)
    assert [event for _, event in drain(queue)] == [
        "early arrival",
        "step ended",
        "arrival a",
        "arrival b",
    ]


def test_events_need_no_order_of_their_own() -> None:
    queue: EventQueue[object] = EventQueue()
    first, second = object(), object()
    queue.schedule(1.0, first)
    queue.schedule(1.0, second)
    popped = [queue.pop(), queue.pop()]
    assert [one.event for one in popped if one is not None] == [first, second]


def test_an_event_may_be_scheduled_for_the_present() -> None:
    queue: EventQueue[str] = EventQueue()
    for name in ("arrival", "another"):
        queue.schedule(2.0, name, EventPriority.ARRIVAL)
    assert queue.pop() is not None
    queue.schedule(2.0, "a step of no time", EventPriority.COMPLETION)
    assert [event for _, event in drain(queue)] == ["a step of no time", "another"]


def test_cancelled_events_never_come_out() -> None:
    queue: EventQueue[str] = EventQueue()
    handles = [queue.schedule(float(at_s), str(at_s)) for at_s in range(4)]
    assert handles[0].cancel()
    assert handles[2].cancel()
    assert not handles[2].cancel()
    assert [handle.is_waiting for handle in handles] == [False, True, False, True]
    assert queue.next_at_s == 1.0
    assert drain(queue) == [(1.0, "1"), (3.0, "3")]
    assert not handles[3].cancel()


def test_cancelling_everything_empties_the_queue() -> None:
    queue: EventQueue[int] = EventQueue()
    for handle in [queue.schedule(1.0, number) for number in range(1000)]:
        handle.cancel()
    assert queue.pop() is None
    assert queue.now_s == 0


@pytest.mark.parametrize("at_s", [0.999, -1.0, math.nan, math.inf, -math.inf])
def test_nothing_can_be_scheduled_for_the_past_or_never(at_s: float) -> None:
    queue: EventQueue[str] = EventQueue()
    queue.schedule(1.0, "first")
    queue.pop()
    with pytest.raises(ValueError, match=r"'late' at .* the present is 1\.0 s"):
        queue.schedule(at_s, "late")


def test_the_clock_may_stand_but_not_go_back() -> None:
    clock: EventQueue[str] = EventQueue()
    clock.advance_to(1.5)
    clock.advance_to(1.5)
    with pytest.raises(ValueError, match=r"the clock is at 1.5 s and cannot go to 1 s"):
        clock.advance_to(1)
    with pytest.raises(ValueError, match="nan"):
        clock.advance_to(math.nan)
    assert clock.now_s == 1.5
