"""Any sequence of calls on an event queue: the order is that of a sorted list."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gpupoold.sim.clock import EventQueue, Scheduled

SCHEDULE = st.tuples(st.just("schedule"), st.integers(0, 4), st.integers(0, 2))
POP = st.tuples(st.just("pop"), st.just(0), st.just(0))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 300), st.just(0))


@given(st.lists(st.one_of(SCHEDULE, SCHEDULE, CANCEL, POP), max_size=300))
def test_a_queue_is_a_sorted_list(calls: list[tuple[str, int, int]]) -> None:
    queue: EventQueue[int] = EventQueue()
    handles: list[Scheduled[int]] = []
    waiting: list[tuple[float, int, int]] = []  # (time, priority, number of the event)
    for name, value, priority in calls:
        if name == "schedule":
            at_s = queue.now_s + value / 4
            waiting.append((at_s, priority, len(handles)))
            handles.append(queue.schedule(at_s, len(handles), priority))
        elif name == "cancel" and handles:
            number = value % len(handles)
            left = [entry for entry in waiting if entry[-1] != number]
            assert handles[number].cancel() == (len(left) < len(waiting))
            waiting = left
        elif name == "pop":
            expected = min(waiting, default=None)
            popped = queue.pop()
            assert (popped and popped.event) == (expected and expected[-1])
            if expected is not None:
                waiting.remove(expected)
                assert queue.now_s == expected[0]
        assert queue.next_at_s == min((entry[0] for entry in waiting), default=None)
