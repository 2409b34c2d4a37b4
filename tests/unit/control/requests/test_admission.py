"""Requests beyond the bounds, and those that it is too late for."""

from __future__ import annotations

import time
from typing import cast

import pytest

from gpupool_state import History
from gpupoold.config.sections import LimitSettings
from gpupoold.control.access import Keyring
from gpupoold.control.accounting.meters import RefusalEvents
from gpupoold.control.accounting.model_stats import ModelStats
from gpupoold.control.live_requests import LiveRequests
from gpupoold.control.requests.admission import Overload, bound_for
from gpupoold.domain import Priority, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.wire import messages as m
from tests.unit.control.live import live_request

COSTS = ModelCosts(prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=0.1)
TARGETS = Targets(1.0, 0.2)


class Keys:
    """Nobody has a key of high priority unless the test says so; ``k`` may have two requests."""

    has_high = False

    def max_live(self, key_id: str) -> int | None:
        return 2 if key_id == "k" else None


class Queue:
    """A core with two models on one device, and requests that it and the daemon know of."""

    def __init__(self, history: History, **limits: object) -> None:
        self.core = Core(GpupoolPolicy())
        for name in ("a", "b"):
            self._tell(e.ModelAdded(name, TARGETS, 10**9, 1000, COSTS))
        self._tell(e.DeviceUp(0, 8 * 10**10, 1e10), e.Hosted(0, "a"), e.Hosted(0, "b"))
        self._tell(e.MemoryChanged(0, (("a", 0), ("b", 0))))
        self.live = LiveRequests()
        self.stats: dict[str, ModelStats] = {}
        self.reasons: list[str] = []
        self.keys = Keys()
        self.overload = Overload(
            LimitSettings.model_validate(limits),
            history,
            self.live,
            self.stats,
            self.core.state,
            lambda model, reason: self.reasons.append(f"{model} {reason}"),
            cast(Keyring, self.keys),
        )

    def take(
        self,
        model: str,
        request_id: str,
        arrival_s: float | None = None,
        key_id: str = "",
        num_bytes: int = 0,
    ) -> None:
        at_s = time.monotonic() if arrival_s is None else arrival_s
        request = live_request(
            request_id,
            model,
            arrival_s=at_s,
            targets=TARGETS,
            device=None,
            key_id=key_id,
            num_bytes=num_bytes,
        )
        self.live.add(request)
        self._tell(e.Arrived(request_id, model, at_s, 1))

    def ask(
        self, model: str, *, is_routed: bool = True, is_warm: bool = True, late_s: float = 0.0
    ) -> m.AdmissionAnswer:
        now_s = time.monotonic()
        order = m.AddRequest(model, "new", now_s - late_s, 1, 100, [])
        return self.overload.admission(order, now_s, is_routed=is_routed, is_warm=is_warm)

    def ask_as(self, priority: Priority, key_id: str = "") -> int:
        """The status of the answer to a request for ``a``."""
        order = m.AddRequest("a", "new", time.monotonic(), 1, 100, [])
        order.priority, order.key_id = priority, key_id
        return self.overload.admission(order, order.arrival_s, is_routed=True, is_warm=True).status

    def num_refused(self, model: str) -> int:
        return self.stats[model].now.refused if model in self.stats else 0

    def _tell(self, *events: e.Event) -> None:
        self.core.handle(events, time.monotonic())


async def test_bound_of_a_model(history: History) -> None:
    queue = Queue(history, max_live_requests_per_model=2)
    assert queue.ask("a").status == 200
    for request_id in ("a1", "a2"):
        queue.take("a", request_id)
    refused = queue.ask("a")
    assert (refused.status, refused.request_id) == (429, "new")
    assert refused.message == "The model `a` already has 2 requests waiting or running."
    # Answers of 100 tokens, 0.1 s each, and prompts; a busy machine makes it no longer.
    assert refused.retry_after_s == pytest.approx(10.0, rel=0.3)
    assert queue.ask("b").status == 200
    assert (queue.num_refused("a"), queue.num_refused("b")) == (1, 0)
    assert queue.reasons == ["a model_queue_full"]


async def test_bound_of_all(history: History) -> None:
    queue = Queue(history, max_live_requests=2)
    queue.take("a", "a1")
    queue.take("b", "b1")
    for model in ("a", "b"):
        refused = queue.ask(model)
        assert (refused.status, refused.message) == (
            429,
            "2 requests are already waiting or running.",
        )
        assert refused.retry_after_s > 1.0
    assert queue.reasons == ["a queue_full", "b queue_full"]


async def test_bound_of_bytes(history: History) -> None:
    """Half of all for one key, so that another finds room."""
    queue = Queue(history, max_bytes_in_flight=1000)

    def ask(key_id: str, num_bytes: int) -> m.AdmissionAnswer:
        order = m.AddRequest("a", "new", time.monotonic(), 1, 100, [b"x" * num_bytes])
        order.key_id = key_id
        return queue.overload.admission(order, order.arrival_s, is_routed=True, is_warm=True)

    queue.take("a", "a1", num_bytes=400, key_id="k")
    assert ask("k", 100).status == ask("", 600).status == ask("other", 500).status == 200
    refused = ask("k", 101)
    assert (refused.status, refused.retry_after_s) == (429, 5.0)
    assert "of this API key" in refused.message
    assert "500 bytes" in refused.message
    assert "1,000 bytes" in ask("", 601).message
    assert queue.reasons == ["a bytes_full", "a bytes_full"]


async def test_not_all_are_told_the_same_time(history: History) -> None:
    """Three places, so three at a time; and those who do not come do not count for ever."""
    queue = Queue(history, max_live_requests_per_model=3)
    for number in range(3):
        queue.take("a", f"a{number}")
    reported_s = [queue.ask("a").retry_after_s for _ in range(20)]
    assert reported_s == sorted(reported_s)
    assert reported_s[3] == pytest.approx(2 * reported_s[0], rel=0.2)
    assert reported_s[9] == reported_s[-1] == pytest.approx(4 * reported_s[0], rel=0.2)


async def test_nothing_is_known_of_who_waits_for_an_snapshot(history: History) -> None:
    queue = Queue(history, max_live_requests_per_model=1)
    queue.live.add(live_request("a1", "a", arrival_s=time.monotonic(), device=None))
    assert queue.ask("a", is_warm=False).retry_after_s == 5.0


async def test_no_worker(history: History) -> None:
    queue = Queue(history)
    refused = queue.ask("a", is_routed=False)
    assert (refused.status, refused.retry_after_s) == (503, 1.0)
    assert refused.message == "The model `a` cannot be served right now."
    assert queue.num_refused("a") == 0
    assert queue.reasons == ["a not_served"]


class TestLate:
    """A device with prompts for three seconds, where the first token is due after one."""

    def overloaded(self, history: History, **limits: object) -> Queue:
        queue = Queue(history, **limits)
        for number in range(30):
            queue.take("a", f"a{number}")
        return queue

    async def test_all_are_taken_as_long_as_nobody_says_otherwise(self, history: History) -> None:
        queue = self.overloaded(history)
        assert queue.ask("a", late_s=100.0).status == 200
        assert queue.overload.too_late(time.monotonic() + 100.0) == []

    async def test_refused_when_it_comes(self, history: History) -> None:
        queue = self.overloaded(history, drop_late=True)
        refused = queue.ask("a")
        assert refused.status == 429
        assert "more than the target of 1s" in refused.message
        # When the prompts before another will take a second.
        assert refused.retry_after_s == pytest.approx(2.1, abs=0.2)
        assert queue.num_refused("a") == 1
        assert queue.reasons == ["a too_late"]

    async def test_taken_when_it_can_be_in_time(self, history: History) -> None:
        queue = Queue(history, drop_late=True)
        queue.take("a", "a1")
        assert queue.ask("a").status == 200
        assert queue.ask("a", late_s=2.0).status == 429

    async def test_taken_while_nothing_is_known_of_its_model(self, history: History) -> None:
        queue = self.overloaded(history, drop_late=True)
        assert queue.ask("a", is_warm=False).status == 200

    async def test_dropped_when_it_has_not_begun(self, history: History) -> None:
        queue = Queue(history, drop_late=True)
        at_s = time.monotonic()
        for request_id in ("waits", "sent", "begun", "young"):
            queue.take("a", request_id, at_s - (0.0 if request_id == "young" else 1.5))
        sent, begun = queue.live.get("sent"), queue.live.get("begun")
        assert sent is not None
        assert begun is not None
        sent.device = 0
        begun.add_tokens([7], at_s)  # and its worker has died since
        assert [one.request_id for one in queue.overload.too_late(at_s)] == ["waits"]
        assert queue.stats["a"].now.dropped == 1


async def test_one_event_per_model_and_minute(history: History) -> None:
    events = RefusalEvents(history)
    for _ in range(3):
        events.note("a", "full", 0.0)
        events.note("b", "full", 1.0)
    events.report(59.0)
    events.report(60.5)
    events.report(200.0)
    rows = await history.events_after(0)
    assert [(row.kind, row.subject, row.message) for row in rows] == [
        ("refused", "a", "1 request was refused: full"),
        ("refused", "b", "1 request was refused: full"),
        ("refused", "a", "2 requests were refused: full"),
        ("refused", "b", "2 requests were refused: full"),
    ]


@pytest.mark.parametrize("bound", [1, 2, 3, 4, 10, 1024])
def test_bounds_by_priority(bound: int) -> None:
    keys = Keys()
    order = (Priority.LOW, Priority.NORMAL, Priority.HIGH)
    for keys.has_high in (False, True):
        low, normal, high = (bound_for(one, bound, cast(Keyring, keys)) for one in order)
        assert 1 <= low <= normal <= high == bound
        assert normal == bound or keys.has_high
        # Someone can always be served, and a quarter at most is kept from anybody.
        assert low >= max(1, bound - bound // 4 - 1)
    assert bound_for(Priority.NORMAL, bound, None) == bound
    assert bound_for(Priority.LOW, 8, None) == 6


async def test_low_priority_is_refused_first(history: History) -> None:
    queue = Queue(history, max_live_requests_per_model=4)
    everyone = (Priority.LOW, Priority.NORMAL, Priority.HIGH)
    for number in range(3):
        assert [queue.ask_as(one) for one in everyone] == [200] * 3
        queue.take("a", f"a{number}")
    assert [queue.ask_as(one) for one in everyone] == [429, 200, 200]
    queue.keys.has_high = True
    assert [queue.ask_as(one) for one in everyone] == [429, 429, 200]
    queue.take("a", "a3")
    assert [queue.ask_as(one) for one in everyone] == [429] * 3


async def test_low_priority_is_refused_first_over_all_models(history: History) -> None:
    queue = Queue(history, max_live_requests=4)
    for number in range(3):
        queue.take("b", f"b{number}")
    assert [queue.ask_as(one) for one in (Priority.LOW, Priority.NORMAL)] == [429, 200]


async def test_low_priority_is_told_to_come_later(history: History) -> None:
    """As more have to leave before there is room for it."""
    queue = Queue(history, max_live_requests_per_model=4)
    for number in range(4):
        queue.take("a", f"a{number}", time.monotonic() - 10.0 * number)
    order = m.AddRequest("a", "new", time.monotonic(), 1, 100, [], priority=Priority.LOW)
    low = queue.overload.admission(order, order.arrival_s, is_routed=True, is_warm=True)
    assert low.status == 429
    assert low.retry_after_s >= queue.ask("a").retry_after_s


async def test_bound_of_a_key(history: History) -> None:
    queue = Queue(history)
    queue.take("a", "a1", key_id="k")
    queue.take("a", "a2", key_id="other")
    assert queue.ask_as(Priority.NORMAL, "k") == 200
    queue.take("b", "b1", key_id="k")
    assert queue.ask_as(Priority.HIGH, "k") == 429
    assert queue.ask_as(Priority.LOW, "other") == 200
    assert queue.ask_as(Priority.LOW) == 200
    queue.live.pop("a1")
    assert queue.ask_as(Priority.HIGH, "k") == 200
