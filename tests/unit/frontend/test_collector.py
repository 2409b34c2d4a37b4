"""When a frontend collects its garbage."""

from __future__ import annotations

from gpupoold.frontend.request_context import BytesInFlight
from gpupoold.frontend.server import Collector


def test_garbage_is_collected_soon_after_the_last_request() -> None:
    now_s, in_flight = [0.0], BytesInFlight(100 << 20)
    collector = Collector(in_flight, lambda: now_s[0])
    assert not collector.is_due()  # nothing was done
    with in_flight.holding("") as holding:
        holding.add(1000)
        assert not collector.is_due()
    assert collector.is_due()
    assert not collector.is_due()
    collector.note_garbage()
    assert collector.is_due()


def test_garbage_is_collected_beside_requests_from_time_to_time() -> None:
    now_s, in_flight = [0.0], BytesInFlight(100 << 20)
    collector = Collector(in_flight, lambda: now_s[0])
    with in_flight.holding("small") as small:
        small.add(1000)
        now_s[0] = 59.0
        assert not collector.is_due()
        now_s[0] = 61.0
        assert collector.is_due()
        assert not collector.is_due()
        with in_flight.holding("large") as large:
            large.add(50 << 20)
            now_s[0] = 200.0
            assert not collector.is_due()
            now_s[0] = 662.0
            assert collector.is_due()
        now_s[0] = 663.0
        assert not collector.is_due()
    assert collector.is_due()
