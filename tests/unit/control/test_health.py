"""What the watchdog of the service manager is told of the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gpupoold.control.control_plane import Health
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.live_requests import LiveRequest, LiveRequests
from tests.unit.control.fleet_box import FleetBox
from tests.unit.control.live import live_request
from tests.unit.control.loaded import loaded

TOKEN_TIMEOUT_S = 600.0


def health(live: LiveRequests, fleet: Fleet | None = None) -> Health:
    dispatcher = SimpleNamespace(live=live, token_timeout_s=TOKEN_TIMEOUT_S)
    workers = [SimpleNamespace(is_ready=True), SimpleNamespace(is_ready=False)]
    supervisor = SimpleNamespace(workers=workers)
    fleet = fleet or FleetBox([]).fleet
    return Health(fleet, cast(Any, dispatcher), cast(Any, supervisor))


def request(arrival_s: float) -> LiveRequest:
    return live_request("r1", "qwen", arrival_s=arrival_s, device=None)


def test_rounds_have_to_be_made() -> None:
    watched = health(LiveRequests())
    watched.check(1000.0)
    assert watched.failure_reason(1009.0) == ""
    assert "not been checked for 11 s" in watched.failure_reason(1011.0)
    watched.check(1012.0)
    assert watched.failure_reason(1013.0) == ""


def test_a_request_that_nobody_ends() -> None:
    live = LiveRequests()
    live.add(request(1000.0))
    watched = health(live)
    for now_s, is_stuck in ((1000.0 + TOKEN_TIMEOUT_S, False), (1100.0 + TOKEN_TIMEOUT_S, True)):
        watched.check(now_s)
        assert ("r1 of qwen" in watched.failure_reason(now_s)) == is_stuck
    live.pop("r1")
    assert watched.failure_reason(1100.0 + TOKEN_TIMEOUT_S) == ""


def test_the_line_for_the_status() -> None:
    live = LiveRequests()
    live.add(request(0.0))
    box = FleetBox(["qwen", "gone"])
    box.fleet.host(loaded("qwen"), 0)
    watched = health(live, box.fleet)
    assert watched.summary() == "1 of 2 devices ready, 1 models served, 1 live requests"
