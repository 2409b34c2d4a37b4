"""Placement by best fit against joining the shortest queue (check C18), and the capacities."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import DeviceUp, ModelCosts
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, DeviceState, Model, Request, RequestPhase
from gpupoold.sim.policies import (
    fits,
    load_norm,
    make_policy,
    peak_kv_bytes,
)
from tests.unit.scheduling.driver import Driver

WEIGHT_BYTES, CAPACITY = 1000, 9
COSTS = ModelCosts(prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=0.02)
LONG_PROMPT, LONG_OUTPUT = (4, 1), (1, 4)
ARRIVALS = {"p1": LONG_PROMPT, "o1": LONG_OUTPUT, "p2": LONG_PROMPT, "o2": LONG_OUTPUT}


def placed(policy: Policy, names: tuple[str, ...]) -> list[float]:
    """Peaks of the KV of two devices, a byte per token, after these arrivals."""
    box = Driver(
        policy,
        "a",
        num_devices=2,
        weight_bytes=WEIGHT_BYTES,
        kv_bytes_per_token=1,
        capacity_bytes=WEIGHT_BYTES + CAPACITY,
    )
    for name in names:
        prompt_tokens, max_tokens = ARRIVALS[name]
        box.send(e.Arrived(name, "a", 0.0, prompt_tokens, None, max_tokens=max_tokens))
    requests = box.state.requests.values()
    return [peak_kv_bytes(one for one in requests if one.device == number) for number in (0, 1)]


def test_c18_shortest_queue_overflows() -> None:
    """Aladdin, figure 4: both long prompts on one device, both long answers on the other."""
    assert placed(make_policy("shortest-queue"), ("p1", "o1", "p2", "o2")) == [10, 10]


@pytest.mark.parametrize("order", list(itertools.permutations(ARRIVALS)))
def test_c18_best_fit_finds_the_best_mix_in_any_order(order: tuple[str, ...]) -> None:
    assert placed(make_policy("best-fit"), order) == [7, 7]


@pytest.fixture
def model() -> Model:
    return Model("m", Targets(1.0, 0.1), WEIGHT_BYTES, 1, COSTS)


@pytest.fixture
def device(model: Model) -> DeviceState:
    made = DeviceState(DeviceUp(0, WEIGHT_BYTES + 1000, 1e9), missing_bytes={"m": 0})
    made.batches["m"] = Batch(model)
    return made


def request(
    model: Model, name: str = "new", *, num_tokens: int = 0, arrival_s: float = 0.0
) -> Request:
    """A request of 100 tokens with an expected answer of 50."""
    phase = RequestPhase.DECODING if num_tokens else RequestPhase.HELD
    return Request(
        name, model, arrival_s, 100, None, phase, num_tokens=num_tokens, expected_tokens=50
    )


def test_an_empty_device_takes_a_request(device: DeviceState, model: Model) -> None:
    assert fits(device, request(model), 0.0)


def test_steps_would_be_too_slow(device: DeviceState, model: Model) -> None:
    """A step takes 20 ms and 0.5 ms for each token of context."""
    model.set_costs("", ModelCosts(0.1, 0.0, decode_base_s=0.02, decode_context_s=0.5e-3))
    assert fits(device, request(model), 0.0)  # 100 + 25 tokens: 82.5 ms
    device.join(request(model, "old", num_tokens=1))
    assert not fits(device, request(model), -0.5)


def test_prompts_would_take_too_long(device: DeviceState, model: Model) -> None:
    device.up = replace(device.up, capacity_bytes=10_000)
    for number in range(9):
        device.enqueue(request(model, str(number)))
    assert fits(device, request(model), 0.0)  # ten prompts in a second
    device.enqueue(request(model, "one more"))
    assert not fits(device, request(model), 0.0)


def test_running_answers_would_fall_behind(device: DeviceState, model: Model) -> None:
    device.join(request(model, "old", num_tokens=1))  # the next token is due at 1.1 s
    newcomer = request(model, arrival_s=1.05)
    assert fits(device, newcomer, 0.9)
    assert not fits(device, newcomer, 1.05)


def test_kv_would_not_fit(device: DeviceState, model: Model) -> None:
    """Six answers need 900 bytes of 1,000."""
    for number in range(5):
        device.join(request(model, str(number), num_tokens=1))
    assert fits(device, request(model), 0.0)
    device.join(request(model, "6", num_tokens=1))
    assert not fits(device, request(model), 0.0)


def test_the_norm_counts_requests_and_context(device: DeviceState, model: Model) -> None:
    assert load_norm(device) == 0
    device.join(request(model, "old", num_tokens=1))
    device.enqueue(request(model, "queued"))
    assert load_norm(device) == pytest.approx((2**2 + 250**2) ** 0.5)


def test_two_choices_take_the_device_with_fewer_requests() -> None:
    box = Driver(make_policy("power-of-two"), "a", num_devices=2)
    for number in range(10):
        box.arrive("a", f"r{number}")
    requests = list(box.state.requests.values())
    assert [sum(one.device == number for one in requests) for number in (0, 1)] == [5, 5]
    assert {one.rule for one in requests} == {Rule.TWO_CHOICES}


def test_two_choices_reach_all_devices_but_look_at_two() -> None:
    box = Driver(make_policy("power-of-two"), "a", num_devices=5)
    for number in range(60):
        box.arrive("a", f"r{number}")
    counts = [
        sum(one.device == number for one in box.state.requests.values()) for number in range(5)
    ]
    assert min(counts) >= 6
    assert max(counts) - min(counts) > 1
