"""A backlog that no device has begun with: where it goes, and that it stays there."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Action
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.planned_turns import Loads
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import State
from tests.unit.scheduling.driver import Driver, runs, sends


def busy_driver(num_prompts: int, ttft_s: float) -> Driver:
    """Two devices that serve a and b, and prompts of c, which no device has begun with."""
    driver = Driver(GpupoolPolicy(), "a b c d", 2, targets=Targets(ttft_s, 0.1))
    driver.arrive("a", "a")
    driver.arrive("b", "b")
    driver.step(0, "a")
    driver.step(1, "b")
    for _ in range(num_prompts):
        driver.arrive("c")
    assert {driver.place(f"r{number + 3}")[0] for number in range(num_prompts)} == {"QUEUED"}
    return driver


def device_of_c(driver: Driver) -> int | None:
    [device] = {one.device for one in driver.state.requests.values() if one.model.name == "c"}
    return device


@pytest.mark.parametrize(("num_prompts", "ttft_s"), [(110, 10.0), (12, 1.0), (16, 2.0)])
def test_it_does_not_go_to_and_fro(num_prompts: int, ttft_s: float) -> None:
    """A prompt takes 0.1 s: together they take more than a device has until they are due."""
    driver = busy_driver(num_prompts, ttft_s)
    places = []
    orders = []
    for number in range(20):
        orders += runs(driver.arrive("ab"[number % 2], at_s=0.001 * number))
        places.append(device_of_c(driver))
    assert len(set(places)) == 1
    assert [order for order in orders if order[2] is None] == []  # nobody stops a prefetch


def test_it_leaves_a_full_device_for_one_that_has_time_for_all_of_it() -> None:
    driver = busy_driver(3, 1.0)  # 0.3 of a device, and 0.25 for an answer's steps
    source = device_of_c(driver)
    assert source is not None
    for number in range(6):
        driver.arrive("ab"[source], f"more{number}")  # its model's prompts fill the device
    assert device_of_c(driver) == 1 - source
    assert driver.state.requests["r3"].rule is Rule.MIGRATED_OFF_FULL
    loads = Loads()
    assert loads.of(driver.state.devices[1 - source]) <= 1.0


def test_the_load_of_a_backlog_is_counted_alike_before_and_after_a_move() -> None:
    driver = busy_driver(12, 2.0)
    before = total_load(driver.state)
    driver.send(e.DrainSet(0, is_draining=True))
    assert total_load(driver.state) == pytest.approx(before)


def sent_by(actions: Iterable[Action]) -> list[str]:
    return [request_id for request_id, _ in sends(actions)]


def total_load(state: State) -> float:
    loads = Loads()
    return sum(loads.of(device) for device in state.devices.values())


def test_prompts_that_can_be_in_time_are_sent_before_those_that_cannot() -> None:
    driver = Driver(GpupoolPolicy(), "a b", targets=Targets(10.0, 0.1))
    driver.arrive("a", "a", at_s=100.0)
    for number in range(3):
        driver.send(e.Arrived(f"expired{number}", "b", 50.0, 100))
    driver.send(e.Arrived("hopeful", "b", 95.0, 100))
    driver.send(e.Ended("a"))
    assert sent_by(driver.end_turn()) == ["hopeful"]
    assert sent_by(driver.step(0, "hopeful")) == ["expired0", "expired1", "expired2"]
