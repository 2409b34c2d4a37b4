"""Whole requests: a device keeps a model until its requests are done."""

from __future__ import annotations

import math

from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.baselines import RequestLevelPolicy
from gpupoold.sim.policies import ShortestJobPolicy
from tests.unit.scheduling.driver import Driver, runs, sends


def driver_of(models: str = "a b c", num_devices: int = 1, max_live: float = math.inf) -> Driver:
    return Driver(RequestLevelPolicy("request-level", max_live=max_live), models, num_devices)


def test_a_device_serves_one_model_until_it_has_nothing_left() -> None:
    driver = driver_of()
    driver.arrive("a", "a1", at_s=0.0)
    assert driver.arrive("b", "b1", at_s=1.0) == []
    assert sends(driver.arrive("a", "a2", at_s=2.0)) == [("a2", 0)]
    assert (driver.quota_s(), driver.state.devices[0].then) == (math.inf, None)
    driver.send(e.Ended("a1"))
    assert driver.place("b1") == ("HELD", None)
    assert sends(driver.send(e.Ended("a2"))) == [("b1", 0)]
    assert runs(driver.end_turn()) == [(0, "b", None)]


def test_the_head_of_the_queue_goes_first() -> None:
    driver = driver_of()
    driver.arrive("a", "a1", at_s=0.0)
    driver.arrive("c", "c1", at_s=2.0)
    driver.send(e.Arrived("b1", "b", 1.0, 10))  # came first, but is known last
    driver.send(e.Ended("a1"))
    assert driver.place("b1") == ("SENT", 0)
    assert driver.place("c1") == ("HELD", None)


def test_all_waiting_requests_of_the_model_come_along() -> None:
    driver = driver_of()
    for number, model in enumerate("abcb"):
        driver.arrive(model, at_s=float(number))
    assert sends(driver.send(e.Ended("r1"))) == [("r2", 0), ("r4", 0)]


def test_a_free_device_takes_it_if_it_has_the_model_resident() -> None:
    driver = driver_of(num_devices=3)
    driver.send(e.MemoryChanged(2, (("b", 0),)))
    assert sends(driver.arrive("a")) == [("r1", 0)]
    assert sends(driver.arrive("b")) == [("r2", 2)]
    assert sends(driver.arrive("c")) == [("r3", 1)]
    assert sends(driver.arrive("c")) == [("r4", 1)]


def test_only_hosts_count() -> None:
    driver = driver_of(num_devices=2)
    driver.send(e.Unhosted(0, "a"))
    assert sends(driver.arrive("a")) == [("r1", 1)]
    driver.send(e.Unhosted(1, "a"))
    assert driver.place("r1") == ("HELD", None)
    assert sends(driver.arrive("b")) == [("r2", 0)]


def test_a_limit_on_requests_sends_the_rest_elsewhere_or_makes_them_wait() -> None:
    driver = driver_of("a", num_devices=2, max_live=2)
    places = [sends(driver.arrive("a")) for _ in range(5)]
    assert places == [[("r1", 0)], [("r2", 0)], [("r3", 1)], [("r4", 1)], []]
    assert sends(driver.send(e.Ended("r3"))) == [("r5", 1)]


def test_the_shortest_goes_first_with_an_oracle() -> None:
    driver = Driver(ShortestJobPolicy())
    driver.arrive("a", "a1", at_s=0.0, output_tokens=500)
    driver.arrive("b", "b1", at_s=0.1, output_tokens=400)
    driver.arrive("c", "c1", at_s=0.2, output_tokens=10)
    driver.send(e.Ended("a1"))
    assert driver.place("c1") == ("SENT", 0)
    assert driver.place("b1") == ("HELD", None)


def test_a_device_that_is_lost_returns_its_requests_to_their_place_in_the_queue() -> None:
    driver = driver_of(num_devices=2)
    for number, model in enumerate("abc"):
        driver.arrive(model, at_s=float(number))
    assert driver.place("r3") == ("HELD", None)
    driver.send(e.DeviceDown(0))
    driver.send(e.Ended("r2"))
    assert driver.place("r1") == ("SENT", 1)
    assert driver.place("r3") == ("HELD", None)
