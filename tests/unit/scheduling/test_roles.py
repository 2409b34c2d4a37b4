"""When roles are split, how, and when they are not."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ChangeRole, ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.roles import Demand, best_split, busiest_stage, covers
from tests.unit.scheduling.driver import GB, Driver

PREFILL, DECODE, MIXED = Role.PREFILL, Role.DECODE, Role.MIXED
COSTS = ModelCosts(
    prefill_base_s=0.0, prefill_token_s=1e-4, decode_base_s=0.02, decode_sequence_s=0.001
)


def test_the_busier_stage_is_as_little_busy_as_can_be() -> None:
    demand = Demand(prefill=1.2, decode=0.6)
    assert [busiest_stage(demand, k, 4) for k in (1, 2, 3)] == pytest.approx([1.2, 0.6, 0.6])
    assert best_split(demand, 4) == (2, 0.6)
    assert best_split(demand, 2) == (1, 1.2)
    assert best_split(demand, 4, most_prefill=1) == (1, 1.2)
    assert best_split(demand, 4, least_prefill=3) == (3, 0.6)
    assert best_split(Demand(), 5)[0] == 1
    with pytest.raises(ValueError, match="1 devices"):
        best_split(demand, 1)


def driver(num_devices: int = 4, models: str = "a", **sizes: int) -> Driver:
    return Driver(
        GpupoolPolicy(), models, num_devices, costs=COSTS, targets=Targets(10.0, 0.1), **sizes
    )


def pass_time(
    driver: Driver, seconds: int, rps: int, models: str = "a", prompt_tokens: int = 1000
) -> list[tuple[int, Role]]:
    """Requests that are over as soon as they come; roles that changed."""
    changes = []
    for _ in range(seconds):
        driver.now_s += 1.0
        for number in range(rps):
            name = models[number % len(models)]
            driver.arrive(name, "r", prompt_tokens=prompt_tokens)
            driver.send(e.Ended("r"))
        actions = driver.send(e.Tick())
        changes += [(one.device, one.role) for one in actions if isinstance(one, ChangeRole)]
    return changes


def roles(driver: Driver) -> list[Role]:
    return [one.role for one in driver.state.devices.values()]


# 6/s of 1,000 tokens take 0.6 devices to prefill; answers of 256 tokens 6 * 256 * 0.09 / 70 = 2.


def test_a_model_that_takes_several_devices_has_them_split() -> None:
    box = driver()
    assert pass_time(box, 34, 6) == []  # thirty seconds to see, five to be sure
    assert pass_time(box, 6, 6) == [(0, PREFILL), (1, DECODE), (2, DECODE), (3, DECODE)]
    assert pass_time(box, 600, 6) == []


def test_roles_follow_what_comes_but_not_every_burst() -> None:
    box = driver()
    pass_time(box, 60, 4)
    assert roles(box).count(PREFILL) == 1
    assert pass_time(box, 3, 18) == []
    # 2,500 tokens: as many prompts take one device, so that two prefill.
    changes = pass_time(box, 60, 4, prompt_tokens=2500)
    assert [role for _, role in changes] == [PREFILL]
    assert roles(box).count(PREFILL) == 2


def test_what_takes_one_device_is_not_split() -> None:
    box = driver()
    assert pass_time(box, 60, 1) == []
    assert roles(box) == [MIXED] * 4


def test_a_stage_that_would_be_full_is_not_split_off() -> None:
    box = driver(2)
    assert pass_time(box, 60, 6) == []  # two devices' worth of answers for one
    assert roles(box) == [MIXED] * 2


def test_hot_models_that_fit_together_are_split_together() -> None:
    box = driver(models="a b")
    pass_time(box, 60, 6, "ab")
    assert roles(box).count(PREFILL) == 1
    assert roles(box).count(DECODE) == 3


def test_models_that_take_turns_are_not_split() -> None:
    small = "abcdefgh"
    assert pass_time(driver(models=" ".join(small), weight_bytes=GB), 60, 6, small) == []
    assert pass_time(driver(weight_bytes=60 * GB), 60, 6) == []  # no room for KV beside it
    assert pass_time(driver(models="a b", weight_bytes=30 * GB), 60, 7, "aaaaaab") == []


def test_a_split_ends_when_small_models_have_as_much_to_do() -> None:
    small = "abcdefgh"
    box = driver(models=" ".join(small), weight_bytes=GB)
    pass_time(box, 60, 6)
    assert roles(box).count(PREFILL) == 1
    changes = pass_time(box, 60, 6, small)
    assert [role for _, role in changes] == [MIXED] * 4


def test_fixed_roles_and_drained_devices_are_left_alone() -> None:
    box = driver()
    box.send(e.RoleSet(2, DECODE), e.DrainSet(3, is_draining=True))
    changes = pass_time(box, 60, 4)
    assert changes == [(0, PREFILL), (1, DECODE)]
    assert roles(box) == [PREFILL, DECODE, DECODE, MIXED]


def test_a_fixed_device_that_does_both_keeps_the_others_so() -> None:
    box = driver()
    box.send(e.RoleSet(2, MIXED))
    assert pass_time(box, 60, 6) == []


def test_the_last_device_of_a_stage_is_replaced_at_once() -> None:
    box = driver()
    pass_time(box, 60, 6)
    box.send(e.DeviceDown(0))
    assert not covers(list(box.state.devices.values()))
    [(_, role)] = pass_time(box, 1, 6)
    assert role is not DECODE
    assert covers(list(box.state.devices.values()))


def test_one_device_that_is_left_does_both() -> None:
    box = driver()
    pass_time(box, 60, 6)
    for number in (0, 1, 2):
        box.send(e.DeviceDown(number))
    pass_time(box, 1, 6)
    assert roles(box) == [MIXED]


@pytest.mark.parametrize("small", [0, 3])
def test_one_small_device_does_not_decide_for_all(small: int) -> None:
    """It has KV for 12,500 tokens, the others for 175,000; wherever it is among them."""
    box = Driver(GpupoolPolicy(), "", 0, costs=COSTS)
    box.send(e.ModelAdded("a", Targets(10.0, 0.1), 10 * GB, 400_000, COSTS))
    for number in range(4):
        capacity_bytes = (15 if number == small else 80) * GB
        box.send(e.DeviceUp(number, capacity_bytes, 10 * GB), e.Hosted(number, "a"))
    pass_time(box, 60, 6)
    assert roles(box).count(PREFILL) == 1
