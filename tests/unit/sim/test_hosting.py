"""Hosting in simulated boxes: engines beside each other, and loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from gpupoold.errors import UsageError
from gpupoold.scheduling.events import Action, Event
from gpupoold.scheduling.hosting import SHARED_S
from gpupoold.scheduling.invariants import check_state
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.host import (
    ENGINE_BYTES,
    FREE_ENGINES,
    LIBRARIES_BYTES,
    LOAD_S,
    HostWishes,
    engine_costs,
)
from gpupoold.sim.hosting import BIND_S, EngineCosts, Hosting
from gpupoold.sim.lengths import Lengths
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from tests.sim.box import GB, models, request

LOAD = 5.0
GIB = 1 << 30


def engines(per_device: int) -> EngineCosts:
    return EngineCosts(100, 100 * per_device, LOAD)


def hosting(names: str, num_devices: int, per_device: int) -> Hosting:
    return Hosting(engines(per_device), tuple(names), [models(names)] * num_devices)


class TestStart:
    def test_engines_that_fit_are_on_every_device(self) -> None:
        assert hosting("abc", 2, 3).hosts() == [(n, name) for n in (0, 1) for name in "abc"]

    def test_scarce_memory_is_for_a_device_for_each_model(self) -> None:
        hosts = hosting("abcd", 2, 2).hosts()
        assert sorted(name for _, name in hosts) == ["a", "b", "c", "d"]
        assert sorted(number for number, _ in hosts) == [0, 0, 1, 1]

    def test_models_beyond_the_memory_wait_for_requests(self) -> None:
        assert {name for _, name in hosting("abc", 1, 2).hosts()} == {"a", "b"}

    def test_a_model_is_where_it_can_run(self) -> None:
        placed = Hosting(engines(2), ("a", "b"), [models("a"), models("ab")])
        assert placed.hosts() == [(0, "a"), (1, "a"), (1, "b")]

    def test_an_engine_larger_than_the_limit_is_refused(self) -> None:
        with pytest.raises(UsageError, match="the engine of a takes 100 B"):
            Hosting(EngineCosts(100, 99, LOAD), ("a",), [models("a")])
        with pytest.raises(UsageError, match="the engine of b takes 101 B"):
            Hosting(EngineCosts(50, 100, LOAD, (("b", 101),)), ("a", "b"), [models("ab")])

    def test_engines_of_unequal_sizes(self) -> None:
        """Two small engines fit beside each other, a large one only alone."""
        costs = EngineCosts(100, 200, LOAD, (("c", 200),))
        alone = Hosting(costs, tuple("abc"), [models("abc")])
        assert {name for _, name in alone.hosts()} == {"a", "b"}
        placed = dict.fromkeys(range(2), "")
        for number, name in Hosting(costs, tuple("cab"), [models("abc")] * 2).hosts():
            placed[number] += name
        assert sorted(placed.values()) == ["ab", "c"]

    def test_a_size_of_an_unknown_model_is_refused(self) -> None:
        with pytest.raises(UsageError, match="names d, which is no model here"):
            Hosting(EngineCosts(1, 2, LOAD, (("d", 1),)), ("a",), [models("a")])


class TestCosts:
    def test_engines_that_take_no_memory_have_no_limit(self) -> None:
        assert engine_costs(parse_box("4xA10"), FREE_ENGINES) is None

    def test_the_limit_is_the_daemons(self) -> None:
        # Three quarters of the reserve of a GPU of 80 GiB, which is 3 GiB.
        costs = EngineCosts(ENGINE_BYTES, 3 * GIB * 3 // 4 - LIBRARIES_BYTES, LOAD_S)
        assert engine_costs(parse_box("8xH800")) == costs
        assert costs.most_on_device([f"m{number}" for number in range(20)]) == 7

    def test_wishes_are_kept(self) -> None:
        wishes = HostWishes(engine_bytes=1, engines_bytes=LIBRARIES_BYTES + 2, load_s=3.0)
        assert engine_costs(parse_box("1xA10"), wishes) == EngineCosts(1, 2, 3.0)

    def test_a_limit_needs_the_memory_of_an_engine(self) -> None:
        wishes = HostWishes(engines_bytes=LIBRARIES_BYTES + 2).over(FREE_ENGINES)
        with pytest.raises(UsageError, match="take no memory"):
            engine_costs(parse_box("1xA10"), wishes)
        costs = engine_costs(parse_box("1xA10"), HostWishes(engine_bytes=1).over(wishes))
        assert costs == EngineCosts(1, 2, LOAD_S)


def run(
    requests: list[SimRequest],
    names: str,
    per_device: int,
    *,
    num_devices: int = 1,
    policy: str = "gpupool",
    families: Mapping[str, str] | None = None,
    prefix_bytes: int | None = None,
) -> SimOutcome:
    """Devices of 40 GB, models of 10 GB; the core and the devices are checked at each event."""
    simulation = Simulation(
        {
            name: replace(model, family=(families or {}).get(name, ""))
            for name, model in models(names).items()
        },
        make_policy(policy, PolicyOptions()),
        [BoxDevice(40 * GB)] * num_devices,
        engines=engines(per_device),
        prefix_bytes=prefix_bytes,
    )
    handle = simulation.core.handle

    def checked(events: Iterable[Event], now_s: float) -> list[Action]:
        for device in simulation._devices:
            device.check_memory()
        actions = handle(events, now_s)
        check_state(simulation.core.state)
        return actions

    simulation.core.handle = checked  # type: ignore[method-assign]
    return simulation.run(requests, 10_000.0)


def ttfts_s(outcome: SimOutcome) -> list[float]:
    return [one.token_times_s[0] - one.request.arrival_s for one in outcome.results]


def test_a_request_for_a_model_without_an_engine_waits_for_its_load() -> None:
    requests = [request(name, 20.0 * n) for n, name in enumerate("abcab")]
    requests = [replace(one, id=f"{n}") for n, one in enumerate(requests)]
    outcome = run(requests, "abc", 2)
    # c replaces a, which was not used for longest; a then replaces b, and b replaces c.
    waits_s = [ttft_s > LOAD for ttft_s in ttfts_s(outcome)]
    assert waits_s == [False, False, True, True, True]
    assert outcome.num_loads == 3
    assert all(one.is_finished for one in outcome.results)


def test_a_model_takes_over_an_idle_engine_of_its_family() -> None:
    requests = [request(name, 20.0 * n, request_id=f"{n}") for n, name in enumerate("abcb")]
    outcome = run(requests, "abc", 2, families={"b": "llama", "c": "llama"})
    # a was not used for longest, but c takes over the engine of b, and b takes it back.
    assert (outcome.num_loads, outcome.num_bound) == (0, 2)
    first = run(requests[:1], "abc", 2)
    [usual_s] = ttfts_s(first)
    taken_s, returned_s = ttfts_s(outcome)[2:]
    assert taken_s == pytest.approx(usual_s + BIND_S, abs=0.01)
    assert returned_s == pytest.approx(usual_s - 1.0 + BIND_S, abs=0.01)  # the weights had stayed


def test_fine_tunes_with_requests_take_turns() -> None:
    """Of three with long answers two have engines; all go on with their KV, within seconds."""
    requests = [request(name, 0.1 * n, output_tokens=2_000) for n, name in enumerate("abc")]
    outcome = run(requests, "abc", 2, families=dict.fromkeys("abc", "llama"))
    assert outcome.num_loads == 0
    assert outcome.num_bound > 4
    for one in outcome.results:
        assert len(one.token_times_s) == 2_000
        assert one.is_finished
        assert one.token_times_s == sorted(set(one.token_times_s))
    assert ttfts_s(outcome)[2] < SHARED_S + 2.0


def test_kept_kv_saves_the_next_prefill() -> None:
    """Without host memory for KV the prompts of 5,000 tokens, 0.5 s each, are computed anew."""
    requests = [request(n, prompt_tokens=5_000, output_tokens=1_500) for n in "ab"]
    families = dict.fromkeys("ab", "llama")
    kept, anew = (
        run(requests, "ab", 1, families=families, prefix_bytes=prefix_bytes)
        for prefix_bytes in (None, 0)
    )
    assert kept.num_bound
    ends_s = [max(one.token_times_s[-1] for one in each.results) for each in (kept, anew)]
    assert ends_s[1] > ends_s[0] + 0.5


@pytest.mark.parametrize("policy", ["gpupool", "aegaeon", "shortest-queue"])
@pytest.mark.parametrize("seed", range(3))
def test_shared_engines_serve_every_request(policy: str, seed: int) -> None:
    names = "abcdefg"
    requests = poisson_workload(equal_rates(names, 0.1), 200.0, Lengths(300, 300), seed)
    families = {name: "llama" if name < "e" else "qwen" for name in names}
    outcome = run(list(requests), names, 2, num_devices=2, policy=policy, families=families)
    assert outcome.num_bound
    assert all(one.is_finished for one in outcome.results)


def test_another_family_is_loaded() -> None:
    requests = [request(name, 20.0 * n) for n, name in enumerate("abc")]
    outcome = run(requests, "abc", 2, families={"a": "llama", "b": "llama", "c": "qwen"})
    assert (outcome.num_loads, outcome.num_bound) == (1, 0)


def test_no_engine_leaves_while_its_model_has_requests() -> None:
    requests = [request("a", output_tokens=2_000), request("b", 1.0)]
    outcome = run(requests, "ab", 1)
    [a, b] = outcome.results
    assert b.token_times_s[0] > a.token_times_s[-1] + LOAD
    assert outcome.num_loads == 1


def test_a_load_does_not_stop_the_turns_of_its_device() -> None:
    requests = [request("a", output_tokens=2_000), request("c", 1.0)]
    undisturbed = run(requests[:1], "abc", 2).results[0].token_times_s
    beside = run(requests, "abc", 2).results[0].token_times_s
    during = [at_s for at_s in undisturbed if at_s < 1.0 + LOAD - 0.5]
    assert len(during) > 400
    assert beside[: len(during)] == pytest.approx(during)


def test_late_requests_get_a_further_device() -> None:
    """The requests of c are too many for its only device, and b has both devices without use."""
    requests = [
        request("c", 100.0 + n / 50, request_id=f"{n}", prompt_tokens=256) for n in range(1200)
    ]
    assert hosting("abc", 2, 2).hosts() == [(0, "b"), (0, "c"), (1, "a"), (1, "b")]
    outcome = run(requests, "abc", 2, num_devices=2)
    assert outcome.num_loads == 1
    assert all(device.steps for device in outcome.devices)


def test_busy_models_on_one_device_get_others() -> None:
    """Device 0 has the only engines of d and f, which need more than one device."""
    names = "abcdef"
    assert hosting(names, 2, 3).hosts()[:3] == [(0, "d"), (0, "e"), (0, "f")]
    lengths = Lengths(300, 200)
    requests = poisson_workload(equal_rates("df", 4.0), 200.0, lengths, 0)
    outcome = run(list(requests), names, 3, num_devices=2)
    assert outcome.num_loads
    first, second = (one.steps for one in outcome.devices)
    assert second > first / 3
    assert all(one.is_finished for one in outcome.results)


@pytest.mark.parametrize("policy", ["gpupool", "request-level", "shortest-queue", "best-fit"])
@pytest.mark.parametrize("seed", range(3))
def test_scarce_engines_serve_every_request(policy: str, seed: int) -> None:
    names = "abcdefg"
    lengths = Lengths(300, 60)
    requests = poisson_workload(equal_rates(names, 0.05), 200.0, lengths, seed)
    outcome = run(list(requests), names, 2, num_devices=2, policy=policy)
    assert outcome.num_loads
    assert all(one.is_finished for one in outcome.results)
