"""Requests of high priority go first among those of their model that wait; but not for ever."""

from __future__ import annotations

from gpupoold.domain import Priority, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from tests.unit.scheduling.driver import GB, Driver, sends

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
TTFT_S = 10.0


def waiting_for_room() -> Driver:
    """A device whose KV is taken by one request, so that others wait in the daemon."""
    driver = Driver(
        models="a b",
        targets=Targets(TTFT_S, 0.1),
        kv_bytes_per_token=1_000_000,
        capacity_bytes=12 * GB,
        kv_host_bytes=0,
    )
    driver.arrive("a", "first", prompt_tokens=1500)
    return driver


def order_of(driver: Driver) -> list[str]:
    """The requests in the order in which the device gets them, one after the other."""
    last, order = "first", []
    while len(driver.state.requests) > 1:
        [(last, _)] = sends(driver.send(e.Ended(last)))
        order.append(last)
    return order


def test_high_goes_before_normal_before_low() -> None:
    driver = waiting_for_room()
    for name, priority in (("l", LOW), ("n", NORMAL), ("h", HIGH), ("n2", NORMAL), ("l2", LOW)):
        assert sends(driver.arrive("a", name, prompt_tokens=1500, priority=priority)) == []
    assert order_of(driver) == ["h", "n", "n2", "l", "l2"]


def test_among_equals_nobody_passes() -> None:
    for priority in Priority:
        driver = waiting_for_room()
        for name in ("1", "2", "3"):
            driver.arrive("a", name, prompt_tokens=1500, priority=priority)
        assert order_of(driver) == ["1", "2", "3"]


def test_requests_that_can_be_on_time_pass_a_late_one_of_any_priority() -> None:
    driver = waiting_for_room()
    driver.arrive("a", "late", prompt_tokens=1500, priority=HIGH)
    driver.arrive("a", "on-time", prompt_tokens=1500, at_s=TTFT_S + 1, priority=LOW)
    assert order_of(driver) == ["on-time", "late"]


def test_other_models_are_not_passed() -> None:
    """The model with the least KV is next, whatever its requests' priority."""
    driver = waiting_for_room()
    driver.arrive("b", "low", prompt_tokens=1500, priority=LOW)
    driver.arrive("a", "high", prompt_tokens=1500, priority=HIGH)
    assert order_of(driver) == ["low", "high"]


def test_order_among_those_that_wait_for_their_model_s_turn() -> None:
    driver = Driver(GpupoolPolicy(), "a b", capacity_bytes=12 * GB)
    driver.arrive("a", "running", prompt_tokens=10)
    for name, priority in (("n", NORMAL), ("l", LOW), ("h", HIGH)):
        assert sends(driver.arrive("b", name, priority=priority)) == []
    driver.step(0, "running")
    sent = sends(driver.send(e.Ended("running"))) + sends(driver.end_turn(0, at_s=1.0))
    assert [name for name, _ in sent] == ["h", "n", "l"]
