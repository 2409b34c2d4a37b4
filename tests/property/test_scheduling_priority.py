"""The order of a queue by priority: among equals first come first served, and nobody for ever."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gpupoold.domain import Priority, Targets
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.state import Batch, Model, Request

TTFT_S = 10.0
MODEL = Model("a", Targets(TTFT_S, 0.1), 1, 1, ModelCosts())
RANK = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}
ARRIVALS = st.lists(st.tuples(st.floats(0, 30), st.sampled_from(list(RANK))), max_size=40)


@given(ARRIVALS)
def test_order_of_a_queue(arrivals: list[tuple[float, Priority]]) -> None:
    batch, now_s, came = Batch(MODEL), 0.0, []
    for number, (gap_s, priority) in enumerate(arrivals):
        now_s += gap_s
        request = Request(str(number), MODEL, now_s, 10, None, priority=priority)
        came.append(request)
        batch.insert(request)
    queue = list(batch.requests.values())
    assert len(queue) == len(came) == batch.num_waiting
    assert batch.waiting_tokens == 10 * len(came)
    for priority in RANK:
        of_one = [one for one in queue if one.priority is priority]
        assert of_one == [one for one in came if one.priority is priority]
    place = {one.id: index for index, one in enumerate(queue)}
    for index, one in enumerate(came):
        for later in came[index + 1 :]:
            if place[later.id] < place[one.id]:
                # Passed only by higher ones, which came soon after it.
                assert RANK[later.priority] > RANK[one.priority]
                assert later.arrival_s - one.arrival_s < 2 * TTFT_S
