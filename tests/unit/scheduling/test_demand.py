"""Work of the stages, worked out by hand."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.observed import RequestClass
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.roles import Demand, decoding_now, demand_of, demands_on
from gpupoold.scheduling.state import Model
from tests.unit.scheduling.driver import Driver

GB = 10**9
COSTS = ModelCosts(
    prefill_base_s=0.0, prefill_token_s=1e-4, decode_base_s=0.02, decode_sequence_s=0.001
)
KIND = RequestClass(1000, 100)


def model(name: str = "a", kv_bytes_per_token: int = 1000) -> Model:
    return Model(name, Targets(10.0, 0.1), 10 * GB, kv_bytes_per_token, COSTS)


def test_devices_worth_of_work_by_stage() -> None:
    """2/s: each 0.1 s to prefill; 70 decode at once in steps of 90 ms, and stay 9 s."""
    demand = demand_of(model(), {KIND: 2.0}, 80 * GB, 10 * GB)
    assert demand.prefill == pytest.approx(0.2)
    assert demand.decode == pytest.approx(2 * 9 / 70)
    assert demand.total == pytest.approx(0.2 + 2 * 9 / 70)
    assert demand + Demand(1.0, 2.0) == Demand(demand.prefill + 1, demand.decode + 2)


def test_a_slow_link_is_the_prefill_devices_limit() -> None:
    demand = demand_of(model(kv_bytes_per_token=100_000), {KIND: 2.0}, 80 * GB, GB / 10)
    assert demand.prefill == pytest.approx(2.0)  # 2,000 tokens/s come, 1,000 go


def test_little_memory_makes_small_batches() -> None:
    """Room for 10 times 1,050 tokens: steps of 30 ms, answers stay 3 s."""
    capacity_bytes = 10 * GB + 10 * 1050 * 1000
    demand = demand_of(model(), {KIND: 2.0}, capacity_bytes, 10 * GB)
    assert demand.decode == pytest.approx(2 * 3 / 10)


def test_answers_under_way_are_work_too() -> None:
    """70 answers fill a device; 21 on two devices are 0.3 of one, whatever has arrived."""
    driver = Driver(GpupoolPolicy(), "a", 2, costs=COSTS, targets=Targets(10.0, 0.1))
    for number in range(21):
        driver.arrive("a", f"r{number}")
        driver.step(0, f"r{number}")
    driver.arrive("a", "waits")
    model = driver.state.models["a"]
    assert decoding_now(driver.state, model, 80 * GB) == pytest.approx(0.3)
    driver.send(e.RoleSet(0, Role.PREFILL))  # all are on their way
    assert decoding_now(driver.state, model, 80 * GB) == pytest.approx(0.3)
    [demand] = demands_on(driver.state, {"a": {KIND: 0.1}, "gone": {}}, driver.state.devices[0])
    assert (demand.prefill, demand.decode) == pytest.approx((0.01, 0.3))


def test_models_that_decode_in_turns_read_each_others_weights() -> None:
    driver = Driver(models="a b", costs=COSTS)
    rates = {name: {KIND: 1.0} for name in "ab"}
    alone = demands_on(driver.state, rates, driver.state.devices[0])
    sharing = demands_on(driver.state, rates, driver.state.devices[0], "ab")
    for one, other in zip(alone, sharing, strict=True):
        assert other.decode > one.decode
        assert other.prefill == one.prefill
