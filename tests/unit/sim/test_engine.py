"""The simulator's engine: every token accounted for, and impossible boxes refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from gpupoold.domain import Role
from gpupoold.errors import UsageError
from gpupoold.replay.log_file import RecordedCore, replay_on
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import Action, Event, Tick
from gpupoold.scheduling.invariants import check_state
from gpupoold.sim.device import BoxDevice, on_nodes
from gpupoold.sim.engine import Simulation
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import POLICY_NAMES, PolicyOptions, make_policy
from gpupoold.sim.workloads import equal_rates, poisson_workload
from tests.sim.box import GB, models, request, simulate

every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


@every_policy
def test_every_request_gets_exactly_its_tokens_in_order(policy: str) -> None:
    box = models("abcdef", weight_gb=20)
    requests = poisson_workload(equal_rates(list(box), 0.3), 60.0, sharegpt_lengths(), seed=3)
    outcome = simulate(requests, box, policy, num_devices=2 if policy != "static" else 4)
    assert [len(result.token_times_s) for result in outcome.results] == [
        one.output_tokens for one in requests
    ]
    for result in outcome.results:
        times = [result.request.arrival_s, *result.token_times_s]
        assert all(later > earlier for earlier, later in itertools.pairwise(times))


class Watched:
    """A core that is recorded, and checked at every step."""

    def __init__(self, core: Core) -> None:
        self.state = core.state
        self.recorded = RecordedCore(core, 1_000_000)
        self.max_sent = 0

    def handle(self, events: Iterable[Event], now_s: float) -> list[Action]:
        actions = self.recorded.handle(events, now_s)
        check_state(self.state)
        batches = [b for d in self.state.devices.values() for b in d.working.values()]
        self.max_sent = max(self.max_sent, sum(len(batch.requests) for batch in batches))
        return actions


@every_policy
def test_the_core_is_sound_at_every_moment_and_replays(policy: str) -> None:
    box = models("abcdef", weight_gb=10 if policy == "static" else 30)
    requests = poisson_workload(equal_rates(list(box), 0.3), 40.0, sharegpt_lengths(), seed=4)
    simulation = Simulation(box, make_policy(policy, PolicyOptions(1)), [BoxDevice(80 * GB)] * 3)
    watched = Watched(simulation.core)
    simulation.core = watched  # type: ignore[assignment]
    simulation.run(requests, 200.0)
    [segment] = watched.recorded.segments
    assert len(segment.entries) > 100
    assert replay_on(segment.core(), segment.entries) is None


@pytest.mark.parametrize("policy", sorted({*POLICY_NAMES} - {"static", "request-level-4"}))
def test_requests_wait_for_kv_room_and_are_all_served(policy: str) -> None:
    """On each of two devices 3,000 tokens fit beside the weights: 4 requests."""
    box = models("abc", weight_gb=10, kv_bytes_per_token=1_000_000)
    requests = [
        request("abc"[n % 3], n / 10, request_id=f"r{n}", prompt_tokens=500, output_tokens=100)
        for n in range(36)
    ]
    num_sent = {}
    for kv_host_bytes in (0, None):
        policy_made = make_policy(policy, PolicyOptions(1))
        simulation = Simulation(
            box, policy_made, [BoxDevice(13 * GB, kv_host_bytes=kv_host_bytes)] * 2
        )
        watched = Watched(simulation.core)
        simulation.core = watched  # type: ignore[assignment]
        outcome = simulation.run(requests, 2000.0)
        assert all(len(result.token_times_s) == 100 for result in outcome.results)
        num_sent[kv_host_bytes] = watched.max_sent
    assert num_sent[0] <= 8 < num_sent[None]


def test_a_device_never_works_on_two_things_at_once() -> None:
    box = models("ab", weight_gb=30)
    requests = poisson_workload(equal_rates(["a", "b"], 1.0), 20.0, sharegpt_lengths(), seed=2)
    outcome = simulate(requests, box)
    [device] = outcome.devices
    last_s = max(result.token_times_s[-1] for result in outcome.results)
    assert device.busy_s + device.switch_s <= last_s + 1e-6


def test_time_of_work_is_counted_until_the_given_time() -> None:
    box = models("a")
    simulation = Simulation(box, make_policy("gpupool", PolicyOptions()), [BoxDevice(80 * GB)])
    # A load of 1 s, a prefill of 20 ms, then steps of 10 ms.
    outcome = simulation.run([request("a", output_tokens=1000)], 100.0, counted_until_s=2.0)
    assert outcome.devices[0].switch_s == pytest.approx(1.0)
    assert outcome.devices[0].busy_s == pytest.approx(1.0)


def test_loads_into_free_memory_are_no_switches() -> None:
    requests = [
        request("ab"[n % 2], arrival_s=10.0 * n, request_id=f"r{n}", output_tokens=10)
        for n in range(4)
    ]
    [together] = simulate(requests, models("ab", weight_gb=30)).devices
    [in_turn] = simulate(requests, models("ab", weight_gb=50)).devices
    assert (together.switches, in_turn.switches) == (0, 3)


def test_a_batch_shares_its_steps() -> None:
    pair = [request("a", request_id=f"r{n}", output_tokens=50) for n in range(2)]
    one, other = simulate(pair, models("a")).results
    # The second is prefilled before the first decodes on; from then on they step together.
    assert one.token_times_s[1:-1] == pytest.approx(other.token_times_s[1:-1], abs=0.011)
    assert other.token_times_s[-1] - other.token_times_s[0] == pytest.approx(0.49)


def test_switching_back_and_forth_costs_only_missing_bytes() -> None:
    pair = [request(name, prompt_tokens=10, output_tokens=300) for name in "ab"]
    fitting = simulate(pair, models("ab", weight_gb=10)).devices[0]
    tight = simulate(pair, models("ab", weight_gb=50)).devices[0]
    assert fitting.moved_bytes == 20 * GB
    assert tight.moved_bytes >= 100 * GB


def test_request_level_makes_the_other_model_wait() -> None:
    long = request("a", prompt_tokens=10, output_tokens=3000)
    short = request("b", 0.1, prompt_tokens=10, output_tokens=10)
    fast = simulate([long, short], models("ab")).results[1].token_times_s[0]
    slow = simulate([long, short], models("ab"), "request-level").results[1].token_times_s[0]
    assert fast < 5 < 30 < slow


def test_the_shortest_waiting_request_goes_first_with_an_oracle() -> None:
    requests = [
        request("a", output_tokens=500),
        request("b", 0.1, output_tokens=400),
        request("c", 0.2, output_tokens=10),
    ]
    box = models("abc")
    by_arrival = simulate(requests, box, "request-level").results
    by_length = simulate(requests, box, "request-level-sjf").results
    assert by_arrival[1].token_times_s[0] < by_length[1].token_times_s[0]
    assert by_length[2].token_times_s[0] < by_arrival[2].token_times_s[0]


@every_policy
def test_a_run_that_is_cut_off_keeps_the_tokens_until_then(policy: str) -> None:
    late = request("a", 5.0, request_id="late")
    [result, never] = simulate(
        [request("a", output_tokens=10_000), late], models("a"), policy, end_s=2.0
    ).results
    assert len(result.token_times_s) == pytest.approx((2.0 - 1.02) / 0.01, abs=2)
    assert max(result.token_times_s) <= 2.0
    assert list(never.token_times_s) == []
    assert summarise([result], 2.0).overall.attainment == 1.0


def test_progress_is_reported_in_virtual_time() -> None:
    reported: list[float] = []
    requests = [request("ab"[n % 2], 0.1 * n, request_id=f"r{n}") for n in range(2000)]
    simulation = Simulation(models("ab"), make_policy("gpupool"), [BoxDevice(80 * GB)])
    simulation.run(requests, 300.0, reported.append)
    assert reported
    assert reported == sorted(reported)
    assert reported[-1] <= 300.0


def test_models_run_where_their_weights_are_near() -> None:
    box = models("ab")
    devices = on_nodes([BoxDevice(80 * GB)] * 2, box, 0.5)
    simulation = Simulation(box, make_policy("gpupool"), devices)
    outcome = simulation.run([request("b", 1.0), request("a", 100.0)], 200.0)
    assert [tally.moved_bytes for tally in outcome.devices] == [10 * GB, 10 * GB]
    waits_s = [one.token_times_s[0] - one.request.arrival_s for one in outcome.results]
    assert waits_s == pytest.approx([1.02, 1.02])


def test_impossible_boxes_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Simulation(models("a"), make_policy("gpupool"), [BoxDevice(GB)] * 0)
    with pytest.raises(UsageError, match=r"a weighs 10 GB, a device has 1 GB"):
        Simulation(models("a"), make_policy("gpupool"), [BoxDevice(GB)])
    with pytest.raises(UsageError, match="asks for z, an unknown model"):
        simulate([request("z")], models("a"))
    with pytest.raises(UsageError, match="static refuses: "):
        Simulation(models("abc", weight_gb=30), make_policy("static"), [BoxDevice(80 * GB)])


ROLES = [
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.MIXED, Role.DECODE),
    (Role.PREFILL,) * 3,
    (Role.DECODE,) * 3,
]


@pytest.mark.parametrize("roles", ROLES, ids=lambda roles: "-".join(roles))
@every_policy
def test_roles_cost_no_request_a_token(policy: str, roles: tuple[Role, ...]) -> None:
    box = models("abcd", weight_gb=10 if policy == "static" else 20)
    requests = poisson_workload(equal_rates(list(box), 0.5), 20.0, sharegpt_lengths(), seed=3)
    simulation = Simulation(box, make_policy(policy), [BoxDevice(80 * GB)] * 3, roles=roles)
    watched = Watched(simulation.core)
    simulation.core = watched  # type: ignore[assignment]
    outcome = simulation.run(requests, 10_000.0)
    assert [len(one.token_times_s) for one in outcome.results] == [
        one.output_tokens for one in requests
    ]
    assert tuple(one.role for one in watched.state.devices.values()) == roles


def test_roles_are_for_all_devices() -> None:
    with pytest.raises(UsageError, match="1 roles for 2 devices"):
        Simulation(
            models("a"), make_policy("gpupool"), [BoxDevice(80 * GB)] * 2, roles=[Role.MIXED]
        )


def test_the_core_gets_a_tick_every_second_while_anything_is_to_come() -> None:
    simulation = Simulation(models("a"), make_policy("gpupool"), [BoxDevice(80 * GB)])
    ticks_s: list[float] = []
    handle = simulation.core.handle

    def listening(events: Iterable[Event], now_s: float) -> list[Action]:
        events = list(events)
        ticks_s.extend(now_s for one in events if isinstance(one, Tick))
        return handle(events, now_s)

    simulation.core.handle = listening  # type: ignore[method-assign]
    simulation.run([request("a", output_tokens=200)], 10_000.0)  # 1.02 s and 1.99 s of steps
    assert ticks_s == [1.0, 2.0, 3.0, 4.0]
