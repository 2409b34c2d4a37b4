"""The same run twice is the same run: no clock, no global, no order of a dictionary in it."""

from __future__ import annotations

import itertools

import pytest

from gpupoold.sim.boxes import SimModel
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.policies import POLICY_NAMES, PolicyOptions, make_policy
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from tests.sim.box import GB, models, request, simulate

NAMES = "abcdefgh"
every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


def workload(seed: int = 1, rate_rps: float = 0.2) -> tuple[SimRequest, ...]:
    return poisson_workload(equal_rates(list(NAMES), rate_rps), 30.0, sharegpt_lengths(), seed)


def box_for(policy: str, names: str = NAMES) -> dict[str, SimModel]:
    return models(names, weight_gb=12 if policy == "static" else 30)


def run(policy: str, names: str = NAMES, seed: int = 1) -> SimOutcome:
    return simulate(workload(seed), box_for(policy, names), policy, num_devices=3, end_s=300.0)


@every_policy
def test_the_same_seed_gives_the_same_outcome(policy: str) -> None:
    first = run(policy)
    assert first == run(policy)
    assert first != run(policy, seed=2)


@every_policy
def test_the_order_in_which_models_are_named_does_not_matter(policy: str) -> None:
    assert run(policy, NAMES) == run(policy, NAMES[::-1]) == run(policy, "cahgbdfe")


@every_policy
def test_runs_in_one_process_do_not_mix(policy: str) -> None:
    """Turns and requests are numbered per run, so a run between two others changes nothing."""

    def turns(seed: int) -> tuple[int, SimOutcome]:
        options = PolicyOptions(num_prefill=1)
        box = Simulation(box_for(policy), make_policy(policy, options), [BoxDevice(80 * GB)] * 3)
        outcome = box.run(workload(seed), 300.0)
        return box.core.state.num_turns, outcome

    first, _, again = turns(1), turns(2), turns(1)
    assert first == again
    assert first[0] == sum(device.turns for device in first[1].devices)


@pytest.mark.parametrize("policy", ["gpupool", "request-level", "prefill-first"])
def test_of_requests_of_the_same_time_the_first_in_the_list_goes_first(policy: str) -> None:
    for order in itertools.permutations("abc"):
        requests = [request("a", 1.0, request_id=name) for name in order]
        outcome = simulate(requests, models("a"), policy)
        first_s = [result.token_times_s[0] for result in outcome.results]
        assert [result.request.id for result in outcome.results] == list(order)
        assert first_s == sorted(first_s)
        assert len(set(first_s)) == 3


def test_what_ends_comes_before_what_arrives_at_the_same_time() -> None:
    """At 2.02 s the last token of the first is out, and its device is free for the second."""
    first = request("a", 1.0, output_tokens=1)  # a second of switching, 20 ms of prefill
    second = request("b", 2.02)
    together = simulate([first, second], models("ab"), "request-level", num_devices=2)
    assert together.results[0].token_times_s == pytest.approx([2.02])
    assert [device.turns for device in together.devices] == [2, 0]


@every_policy
def test_ties_everywhere_are_broken_the_same_way(policy: str) -> None:
    requests = [
        request(name, at_s, request_id=f"{name}{at_s}", output_tokens=40)
        for at_s in (0.0, 0.0, 5.0)
        for name in NAMES
    ]
    requests = [
        SimRequest(f"r{n}", r.model, r.arrival_s, r.prompt_tokens, r.output_tokens)
        for n, r in enumerate(requests)
    ]
    outcomes = [
        simulate(requests, box_for(policy, names), policy, num_devices=3)
        for names in (NAMES, NAMES[::-1])
    ]
    assert outcomes[0] == outcomes[1]
    assert all(result.is_finished for result in outcomes[0].results)
