"""What the core learns of steps: of the kind of device, and of what really ran."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.state import Speed
from tests.unit.scheduling.driver import GB, Driver

# A step of n sequences takes 10 ms each.
COSTS = ModelCosts(decode_base_s=0.0, decode_sequence_s=0.01, decode_context_s=0.0)
SLOW = ModelCosts(decode_base_s=0.0, decode_sequence_s=0.04, decode_context_s=0.0)


def unlike_driver() -> Driver:
    """Two devices of one kind and one of another, which is four times as slow."""
    driver = Driver(models="", num_devices=0)
    driver.send(e.ModelAdded("a", Targets(), GB, 1, COSTS))
    for number, kind in enumerate(("fast", "fast", "slow")):
        driver.send(e.DeviceUp(number, 80 * GB, GB, kind=kind))
        driver.send(e.Hosted(number, "a", SLOW if kind == "slow" else COSTS))
    return driver


def speed_on(driver: Driver, device: int) -> Speed:
    return driver.state.devices[device].speed(driver.state.models["a"])


class TestSteps:
    def test_a_step_is_compared_with_what_ran_in_it(self) -> None:
        """Of three requests one is decoded; the second waits, and the KV of the third is away."""
        driver = Driver(models="a", costs=COSTS)
        for request_id in ("ran", "waits", "away"):
            driver.arrive("a", request_id)
        driver.step(0, "ran", "away")
        for _ in range(200):
            driver.step(0, "ran", step_s=0.01)
        assert driver.state.models["a"].speed().step_ratio == pytest.approx(1.0)

    def test_several_steps_are_compared_by_their_middle_one(self) -> None:
        costs = ModelCosts(decode_base_s=0.0, decode_context_s=1e-4)
        driver = Driver(models="a", costs=costs)
        driver.arrive("a", "r", prompt_tokens=100)
        driver.step(0, "r")
        # With 101 to 111 tokens of context; the middle one of eleven steps has 106.
        driver.step(0, "r", num_tokens=11, step_s=106e-4)
        assert driver.state.models["a"].speed().step_ratio == pytest.approx(1.0)

    def test_a_step_of_requests_that_are_gone_teaches_nothing(self) -> None:
        driver = Driver(models="a", costs=COSTS)
        driver.arrive("a", "r")
        driver.send(e.Stepped(0, "a", ("gone",), 1, 9.0))
        assert driver.state.models["a"].speed().step_ratio == 1.0


class TestKinds:
    def test_each_kind_has_costs_of_its_own(self) -> None:
        driver = unlike_driver()
        steps_s = [one.batches["a"].speed.step_s(1, 0) for one in driver.state.devices.values()]
        assert steps_s == pytest.approx([0.01, 0.01, 0.04])

    def test_what_is_learnt_holds_for_devices_of_the_same_kind(self) -> None:
        driver = unlike_driver()
        driver.arrive("a", "r")
        for _ in range(100):
            driver.step(0, "r", step_s=0.02)
        ratios = [speed_on(driver, number).step_ratio for number in range(3)]
        assert ratios == pytest.approx([2.0, 2.0, 1.0], abs=0.01)

    def test_a_new_host_does_not_reset_it(self) -> None:
        driver = unlike_driver()
        driver.arrive("a", "r")
        for _ in range(100):
            driver.step(0, "r", step_s=0.02)
        driver.send(
            e.DeviceUp(3, 80 * GB, GB, kind="fast"),
            e.ModelAdded("a", Targets(), GB, 1, COSTS),
            e.Hosted(3, "a", COSTS),
        )
        assert speed_on(driver, 3).step_ratio == pytest.approx(2.0, abs=0.01)

    def test_costs_that_were_measured_anew_do(self) -> None:
        driver = unlike_driver()
        driver.arrive("a", "r")
        driver.step(0, "r", step_s=0.02)
        driver.send(e.Hosted(1, "a", SLOW))
        assert (speed_on(driver, 0).costs, speed_on(driver, 0).step_ratio) == (SLOW, 1.0)

    def test_a_queue_is_reckoned_at_the_speed_of_its_device(self) -> None:
        driver = unlike_driver()
        driver.send(*(e.DrainSet(number, is_draining=True) for number in range(2)))
        driver.arrive("a", "r")
        [batch] = driver.state.devices[2].working.values()
        assert batch.speed is speed_on(driver, 2)
