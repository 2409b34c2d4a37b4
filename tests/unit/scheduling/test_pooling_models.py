"""Models without decode steps: their results are first tokens, and nothing follows."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.latency.models import LatencyModel, LinearDecode, LinearPrefill, SwitchModel
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import POOLING_COSTS, ModelCosts, costs_of
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.wait_estimate import first_token_in_s
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.policies import POLICY_NAMES, make_policy
from gpupoold.sim.workloads import SimRequest
from tests.unit.scheduling.driver import GB, Driver, migrations_in, sends

PREFILL_S = 0.1
COSTS = ModelCosts(prefill_base_s=PREFILL_S, prefill_token_s=0.0, decode_base_s=0.0)


def driver(num_devices: int = 1) -> Driver:
    """A chat model ``a``, and ``p``, which embeds and needs no KV."""
    made = Driver(GpupoolPolicy(), "a", num_devices, targets=Targets(10.0, 0.1))
    made.send(e.ModelAdded("p", Targets(2.0, 0.1), GB, 0, COSTS, generates=False))
    made.send(*(e.Hosted(number, "p") for number in range(num_devices)))
    return made


def ask(box: Driver, name: str) -> None:
    box.send(e.Arrived(name, "p", box.now_s, 100, max_tokens=1))


def finish(box: Driver, name: str) -> list[object]:
    return list(box.send(e.Stepped(0, "p", (name,)), e.Ended(name)))


def test_a_turn_takes_the_time_of_the_prompts() -> None:
    box = driver()
    for number in range(3):
        ask(box, f"r{number}")
    box.arrive("a", "chat")
    assert box.running() == "p"  # the earlier due time
    assert box.quota_s() <= 3 * PREFILL_S + box.state.devices[0].switch_s(box.state.models["p"])
    for number in range(3):
        finish(box, f"r{number}")
    assert "p" not in box.state.devices[0].working
    box.end_turn()
    assert box.running() == "a"


def test_a_due_chat_comes_first() -> None:
    box = driver()
    box.arrive("a", "chat")
    box.now_s = 9.0
    ask(box, "r")
    box.end_turn()
    assert box.running() == "a"
    box.step(0, "chat")
    assert first_token_in_s(box.state, box.state.models["p"], 100, box.now_s) is not None


def test_results_are_never_decoded_elsewhere() -> None:
    box = driver(2)
    box.send(e.RoleSet(0, Role.PREFILL, True), e.RoleSet(1, Role.DECODE, True))
    actions = box.send(e.Arrived("r", "p", 0.0, 100, max_tokens=1))
    assert sends(actions) == [("r", 0)]
    assert migrations_in(finish(box, "r")) == []  # type: ignore[arg-type]
    assert not box.state.requests
    assert box.send(e.Tick()) == []


def test_lengths_of_answers_are_not_learnt_from_results() -> None:
    box = driver()
    ask(box, "r")
    assert box.state.requests["r"].expected_tokens == 1
    finish(box, "r")
    assert not list(box.state.lengths.recent("p"))


def test_the_guess_has_no_decode_steps() -> None:
    assert POOLING_COSTS.step_s(8, 1000) == 0.0
    latency = LatencyModel(
        LinearPrefill(0.0, PREFILL_S), LinearDecode(), SwitchModel(1e9), source="measured"
    )
    assert costs_of(latency).step_s(8, 1000) == 0.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_one(policy: str) -> None:
    prefill = LinearPrefill(0.0, PREFILL_S)
    decodes = {"p": LinearDecode(), "a": LinearDecode(0.0, 0.0, 0.02)}
    models = {
        name: SimModel(
            name,
            Targets(10.0, 0.1),
            LatencyModel(prefill, decode, SwitchModel(1e10), source="here"),
            GB,
            0 if name == "p" else 100_000,
            name != "p",
        )
        for name, decode in decodes.items()
    }
    requests = [
        SimRequest(str(number), "ap"[number % 2], 0.5 * number, 100, 1 if number % 2 else 20)
        for number in range(40)
    ]
    outcome = Simulation(models, make_policy(policy), [BoxDevice(8 * GB)] * 2).run(requests, 600.0)
    assert len(outcome.results) == len(requests)
    for one in outcome.results:
        assert len(one.token_times_s) == one.request.output_tokens, one
