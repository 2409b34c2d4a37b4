"""Roles by what arrives: no stage is left without a device, and nothing goes to and fro."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ChangeRole, ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.roles import covers
from tests.unit.scheduling.driver import Driver

COSTS = ModelCosts(
    prefill_base_s=0.0, prefill_token_s=1e-4, decode_base_s=0.02, decode_sequence_s=0.001
)
RATES_RPS = st.integers(0, 12)
PROMPTS = st.integers(1, 6000)


class Arrivals:
    """A box whose requests are over as soon as they come."""

    def __init__(self, num_devices: int, models: str = "a") -> None:
        self.driver = Driver(
            GpupoolPolicy(), models, num_devices, costs=COSTS, targets=Targets(10.0, 0.1)
        )
        self.fixed: set[int] = set()

    def pass_second(self, rps: int, model: str, prompt_tokens: int) -> list[ChangeRole]:
        driver = self.driver
        driver.now_s += 1.0
        for _ in range(rps):
            driver.arrive(model, "r", prompt_tokens=prompt_tokens)
            driver.send(e.Ended("r"))
        before = self.free_covers()
        changes = [one for one in driver.send(e.Tick()) if isinstance(one, ChangeRole)]
        assert len(changes) <= 1
        assert not self.fixed & {one.device for one in changes}
        assert self.free_covers() or not before, "a stage has lost its last device"
        return changes

    def free_covers(self) -> bool:
        devices = [one for one in self.driver.state.devices.values() if not one.is_draining]
        return covers(devices)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 6), RATES_RPS, PROMPTS)
def test_under_a_constant_load_roles_settle(num_devices: int, rps: int, prompt: int) -> None:
    box = Arrivals(num_devices)
    settling = [change for _ in range(60) for change in box.pass_second(rps, "a", prompt)]
    # Each device changes once, and a second time if the split was made on the way.
    assert len(settling) <= 2 * num_devices
    assert [change for _ in range(120) for change in box.pass_second(rps, "a", prompt)] == []


HAPPENINGS = st.one_of(
    st.tuples(st.just("load"), RATES_RPS, PROMPTS),
    st.tuples(st.just("role"), st.sampled_from(Role), st.booleans()),
    st.tuples(st.just("drain"), st.booleans(), st.just(0)),
)


@settings(max_examples=80)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(HAPPENINGS, st.integers(0, 4), st.sampled_from("ab")), max_size=12),
)
def test_whatever_happens_stages_keep_a_device_and_fixed_roles_stay(
    num_devices: int, story: list[tuple[tuple[str, object, object], int, str]]
) -> None:
    box = Arrivals(num_devices, "a b")
    for (what, first, second), which, model in story:
        number = which % num_devices
        if what == "role":
            assert isinstance(first, Role)
            is_fixed = bool(second)
            box.driver.send(e.RoleSet(number, first, is_fixed))
            (box.fixed.add if is_fixed else box.fixed.discard)(number)
        elif what == "drain":
            box.driver.send(e.DrainSet(number, bool(first)))
        else:
            assert isinstance(first, int)
            assert isinstance(second, int)
            for _ in range(12):
                box.pass_second(first, model, second)
    usable = [one for one in box.driver.state.devices.values() if not one.is_draining]
    for _ in range(2 * num_devices + 2):
        box.pass_second(0, "a", 1)
    if usable and not all(one.is_role_fixed for one in usable):
        assert box.free_covers() or _cannot_cover(box)


def _cannot_cover(box: Arrivals) -> bool:
    """Free devices could not help: none is there."""
    return not any(
        not one.is_role_fixed and not one.is_draining for one in box.driver.state.devices.values()
    )
