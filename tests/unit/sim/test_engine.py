"""The simulator's engine: every token accounted for, and times that can be worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.latency.models import LatencyModel, LinearDecode, LinearPrefill, SwitchModel
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.metrics import summarise
from gpupoold.sim.model import SimModel
from gpupoold.sim.policies import POLICIES, policy_named
from gpupoold.sim.run import Point, run_point
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload

GB = 10**9
LATENCY = LatencyModel(
    prefill=LinearPrefill(token_s=1e-4, base_s=0.01),
    decode=LinearDecode(context_s=0.0, sequence_s=0.0, base_s=0.01),
    switch=SwitchModel(10 * GB),
)


def models(*names: str, weight_gb: float = 10) -> dict[str, SimModel]:
    weight_bytes = int(weight_gb * GB)
    return {
        name: SimModel(name, Targets(10.0, 0.1), LATENCY, weight_bytes, 100_000) for name in names
    }


def simulate(
    requests: Sequence[SimRequest],
    box: dict[str, SimModel],
    policy: str = "gpupool",
    num_devices: int = 1,
) -> SimOutcome:
    return Simulation(box, policy_named(policy), num_devices, 80 * GB).run(requests, 10_000.0)


every_policy = pytest.mark.parametrize("policy", POLICIES)


@every_policy
def test_a_lone_request_takes_switch_prefill_and_steps(policy: str) -> None:
    request = SimRequest("r", "a", 1.0, prompt_tokens=100, output_tokens=4)
    [result] = simulate([request], models("a"), policy).results
    first_s = 1.0 + 1.0 + 0.02  # arrival, 10 GB at 10 GB/s, prefill
    assert result.token_times_s == pytest.approx([first_s + k * 0.01 for k in range(4)])


@every_policy
def test_every_request_gets_exactly_its_tokens_in_order(policy: str) -> None:
    box = models(*"abcdef", weight_gb=20)
    rates = equal_rates(list(box), 0.3)
    requests = poisson_workload(rates, 60.0, sharegpt_lengths(), seed=3)
    outcome = simulate(requests, box, policy, num_devices=2)
    assert [len(result.token_times_s) for result in outcome.results] == [
        request.output_tokens for request in requests
    ]
    for result in outcome.results:
        times = [result.request.arrival_s, *result.token_times_s]
        assert all(later > earlier for earlier, later in itertools.pairwise(times))


@every_policy
def test_the_same_seed_gives_the_same_outcome(policy: str) -> None:
    box = models(*"abcd", weight_gb=30)
    requests = poisson_workload(equal_rates(list(box), 0.5), 30.0, sharegpt_lengths(), seed=1)
    assert simulate(requests, box, policy) == simulate(requests, box, policy)


def test_a_device_never_works_on_two_things_at_once() -> None:
    box = models("a", "b", weight_gb=30)
    requests = poisson_workload(equal_rates(["a", "b"], 1.0), 20.0, sharegpt_lengths(), seed=2)
    outcome = simulate(requests, box)
    [device] = outcome.devices
    last_s = max(result.token_times_s[-1] for result in outcome.results)
    assert device.busy_s + device.switch_s <= last_s + 1e-6


def test_a_batch_shares_its_steps() -> None:
    pair = [SimRequest(f"r{n}", "a", 0.0, prompt_tokens=100, output_tokens=50) for n in range(2)]
    one, other = simulate(pair, models("a")).results
    # The second is prefilled before the first decodes on; from then on they step together.
    assert one.token_times_s[1:-1] == pytest.approx(other.token_times_s[1:-1], abs=0.011)
    assert other.token_times_s[-1] - other.token_times_s[0] == pytest.approx(0.49)


def test_switching_back_and_forth_costs_only_missing_bytes() -> None:
    pair = [SimRequest(n, n, 0.0, prompt_tokens=10, output_tokens=300) for n in "ab"]
    fitting = simulate(pair, models("a", "b", weight_gb=10)).devices[0]
    tight = simulate(pair, models("a", "b", weight_gb=50)).devices[0]
    assert fitting.switches == 2
    assert tight.switches > 2


def test_request_level_makes_the_other_model_wait() -> None:
    long = SimRequest("long", "a", 0.0, prompt_tokens=10, output_tokens=3000)
    short = SimRequest("short", "b", 0.1, prompt_tokens=10, output_tokens=10)
    fast = simulate([long, short], models("a", "b")).results[1].token_times_s[0]
    slow = simulate([long, short], models("a", "b"), "request-level").results[1].token_times_s[0]
    assert fast < 5 < 30 < slow


def test_the_shortest_waiting_request_goes_first_with_an_oracle() -> None:
    first = SimRequest("first", "a", 0.0, prompt_tokens=10, output_tokens=500)
    long = SimRequest("long", "b", 0.1, prompt_tokens=10, output_tokens=400)
    short = SimRequest("short", "c", 0.2, prompt_tokens=10, output_tokens=10)
    box = models("a", "b", "c")
    _, by_arrival, _ = simulate([first, long, short], box, "request-level").results
    _, by_length, _ = simulate([first, long, short], box, "request-level-sjf").results
    assert by_arrival.token_times_s[0] < by_length.token_times_s[0]


def test_a_run_that_is_cut_off_keeps_the_tokens_until_then() -> None:
    request = SimRequest("r", "a", 0.0, prompt_tokens=100, output_tokens=10_000)
    box = Simulation(models("a"), policy_named("gpupool"), 1, 80 * GB)
    [result] = box.run([request], end_s=2.0).results
    assert len(result.token_times_s) == pytest.approx((2.0 - 1.02) / 0.01, abs=2)
    assert summarise([result], 2.0).overall.attainment == 1.0


def test_impossible_boxes_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Simulation(models("a"), policy_named("gpupool"), 0, GB)
    with pytest.raises(UsageError, match="weighs"):
        Simulation(models("a"), policy_named("gpupool"), 1, GB)
    with pytest.raises(UsageError, match="no policy"):
        policy_named("best")
    stranger = SimRequest("r", "z", 0.0, 1, 1)
    with pytest.raises(UsageError, match="not there"):
        simulate([stranger], models("a"))


@pytest.mark.parametrize(
    ("text", "expected"), [("16xH800", (16, "H800")), ("A10", (1, "A10")), ("4 x A10", (4, "A10"))]
)
def test_boxes_by_name(text: str, expected: tuple[int, str]) -> None:
    box = parse_box(text)
    assert (box.num_devices, box.gpu) == expected


@pytest.mark.parametrize("text", ["", "0xA10", "4x", "16xTPU", "-1xA10"])
def test_boxes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_box(text)


def test_few_models_on_a_big_box_are_always_in_time() -> None:
    row = run_point(Point(parse_box("4xH800"), 4, 0.1, "gpupool", Targets(), 60.0, 0))
    assert row["attainment"] == 1.0
    assert isinstance(row["ttft_p99_s"], float)
    assert math.isfinite(row["ttft_p99_s"])
