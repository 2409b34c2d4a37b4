"""Aegaeon's algorithms 1 and 2, against the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Action, ModelCosts
from gpupoold.scheduling.policies.aegaeon import AegaeonPolicy
from tests.unit.scheduling.driver import COSTS, GB, Driver, migrations_in, runs, sends

# Numbers that add up exactly in binary, so that equal loads are equal.
PREFILL = ModelCosts(prefill_base_s=0.25, prefill_token_s=2.0**-10)
SWITCH_S = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 0.0}


@dataclass
class Group:
    model: str
    size: int = 0
    jobs: list[tuple[str, int]] = field(default_factory=list)


class Algorithm1:
    """The paper's pseudocode, line by line."""

    def __init__(self, num_workers: int) -> None:
        self.queues: list[list[Group]] = [[] for _ in range(num_workers)]
        self.executing: list[str | None] = [None] * num_workers

    def on_arrival(self, request_id: str, model: str, prompt_tokens: int) -> int:
        min_load_s, chosen = math.inf, 0
        for worker, queue in enumerate(self.queues):
            for group in queue:
                if group.model == model and group.size < 8:
                    group.size += 1
                    group.jobs.append((request_id, prompt_tokens))
                    return worker
            load_s = self.load_s(worker)
            if load_s < min_load_s:
                min_load_s, chosen = load_s, worker
        self.queues[chosen].append(Group(model, 1, [(request_id, prompt_tokens)]))
        return chosen

    def load_s(self, device: int) -> float:
        """Time to finish all pending groups, scaling included."""
        total_s, loaded = 0.0, self.executing[device]
        for group in self.queues[device]:
            if group.model != loaded:
                total_s += SWITCH_S[group.model]
            loaded = group.model
            total_s += sum(0.25 + tokens / 1024 for _, tokens in group.jobs)
        return total_s

    def select(self, device: int) -> str | None:
        """One request from the front group."""
        if not self.queues[device]:
            self.executing[device] = None
            return None
        self.executing[device] = self.queues[device][0].model
        return self.queues[device][0].jobs[0][0]

    def executed(self, device: int) -> None:
        front = self.queues[device][0]
        front.jobs.pop(0)
        if not front.jobs:
            self.queues[device].pop(0)


def prefill_driver(num_prefill: int) -> Driver:
    policy = AegaeonPolicy(num_prefill)
    driver = Driver(policy, "", num_prefill + 1, bandwidth_bytes_per_s=GB)
    for model, switch_s in SWITCH_S.items():
        driver.send(e.ModelAdded(model, Targets(), int(switch_s * GB), 0, PREFILL))
        driver.send(*(e.Hosted(number, model) for number in range(num_prefill + 1)))
    driver.send(e.Tick())
    return driver


def prefill_one(driver: Driver, device: int) -> tuple[str | None, list[Action]]:
    """The device makes the first token of what it was sent first; what it did, and actions."""
    here = driver.state.devices[device]
    if here.turn is None:
        return None, []
    name = here.turn.model
    waiting = [r.id for r in here.batches[name].requests.values()]
    actions = driver.step(device, waiting[0])
    actions += driver.send(e.Ended(waiting[0]))
    if not here.batches[name].requests:
        actions += driver.end_turn(device)
    return waiting[0], actions


# So many requests of a model at once, with prompts of so many tokens.
ARRIVALS = st.tuples(
    st.integers(1, 10), st.sampled_from("abcd"), st.integers(0, 3).map(lambda n: n * 256)
)
PREFILLS = st.tuples(st.integers(0, 9), st.integers(0, 3))  # so many on a device


@settings(max_examples=120)
@given(st.integers(1, 4), st.lists(st.tuples(PREFILLS, ARRIVALS), max_size=30))
def test_algorithm_1_is_the_papers(
    num_prefill: int, story: list[tuple[tuple[int, int], tuple[int, str, int]]]
) -> None:
    driver = prefill_driver(num_prefill)
    paper = Algorithm1(num_prefill)
    for (num_done, which), (num_arrivals, model, prompt_tokens) in story:
        for _ in range(num_arrivals):
            driver.arrive(model, prompt_tokens=prompt_tokens)
            name = f"r{driver.num_requests}"
            expected = paper.on_arrival(name, model, prompt_tokens)
            assert driver.state.requests[name].device == expected
            paper.select(expected)  # an idle worker begins at once
        for _ in range(num_done):
            done, _ = prefill_one(driver, which % num_prefill)
            assert done == paper.select(which % num_prefill)
            if done is not None:
                paper.executed(which % num_prefill)
                paper.select(which % num_prefill)
        assert [driver.running(number) for number in range(num_prefill)] == paper.executing


class TestPrefill:
    def test_a_request_joins_the_first_group_that_takes_it(self) -> None:
        driver = prefill_driver(2)
        assert sends(driver.arrive("a")) == [("r1", 0)]
        assert sends(driver.arrive("b")) == [("r2", 1)]
        assert sends(driver.arrive("b")) == [("r3", 1)]
        assert sends(driver.arrive("a")) == [("r4", 0)]

    def test_the_ninth_of_a_group_opens_another_whatever_has_been_served(self) -> None:
        driver = prefill_driver(2)
        for _ in range(7):
            driver.arrive("a")
        prefill_one(driver, 0)
        assert driver.state.requests["r2"].device == 0
        driver.arrive("a")
        driver.arrive("a")
        assert driver.place("r8") == ("SENT", 0)
        assert driver.place("r9") == ("SENT", 1)

    def test_the_least_loaded_queue_counts_switches(self) -> None:
        driver = prefill_driver(2)
        driver.arrive("b", prompt_tokens=0)  # 2 s of switching, 0.25 s of work; runs at once
        driver.arrive("c", prompt_tokens=1024)  # 1.25 s of work; runs at once
        driver.arrive("a")
        assert driver.place("r3") == ("QUEUED", 0)

    def test_groups_are_served_in_order_and_only_the_front_one_is_sent(self) -> None:
        driver = prefill_driver(1)
        for model in "aba":
            driver.arrive(model)
        assert driver.place("r2") == ("QUEUED", 0)
        assert driver.place("r3") == ("SENT", 0)
        assert [prefill_one(driver, 0)[0] for _ in range(4)] == ["r1", "r3", "r2", None]

    def test_the_next_group_is_made_ready_meanwhile(self) -> None:
        driver = prefill_driver(1)
        assert runs(driver.arrive("a")) == [(0, "a", None)]
        assert runs(driver.arrive("b")) == [(0, "a", "b")]
        assert runs(driver.arrive("c")) == []
        assert driver.quota_s() == 0.25 + 100 / 1024

    def test_the_next_group_is_made_ready_at_the_very_end_too(self) -> None:
        driver = prefill_driver(1)
        for model in "abc":
            driver.arrive(model)
        assert runs(driver.step(0, "r1")) == []  # not c
        assert runs(driver.end_turn()) == [(0, "b", "c")]

    def test_a_second_group_of_the_same_model_is_not_to_be_made_ready(self) -> None:
        driver = prefill_driver(1)
        for model in "a" * 9 + "b":
            driver.arrive(model)
        assert driver.state.devices[0].then == "b"

    def test_a_cancelled_request_leaves_its_group(self) -> None:
        driver = prefill_driver(1)
        for model in "abc":
            driver.arrive(model)
        driver.send(e.Ended("r2"))
        assert [prefill_one(driver, 0)[0] for _ in range(3)] == ["r1", "r3", None]

    def test_without_a_decode_device_a_request_stays(self) -> None:
        driver = Driver(AegaeonPolicy(num_prefill=1), "a")
        driver.arrive("a", "r")
        assert migrations_in(driver.step(0, "r")) == []
        assert driver.place("r") == ("DECODING", 0)


def decode_driver(models: str = "a b c d", num_decode: int = 1, quota_max_s: float = 3.0) -> Driver:
    """One prefill device, and switches of a second."""
    policy = AegaeonPolicy(1, quota_max_s)
    driver = Driver(policy, models, 1 + num_decode, targets=Targets(10.0, 0.1))
    driver.send(e.Tick())
    return driver


def decode(driver: Driver, model: str, request_id: str, prompt_tokens: int = 100) -> int:
    """A request is prefilled and handed over; where to."""
    driver.arrive(model, request_id, prompt_tokens=prompt_tokens)
    [(_, _, target)] = migrations_in(driver.step(0, request_id))
    driver.end_turn(0)
    driver.send(e.Attached(request_id))
    return target


class TestDecode:
    def test_c4_the_papers_example(self) -> None:
        """Three batches, d = 0.1, t = 0.025, c = 3, Q_MAX = 3: turns of 3 s, 120 tokens."""
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
        quotas_s = []
        for _ in range(6):
            driver.end_turn(1)
            quotas_s.append(driver.quota_s(1))
        assert quotas_s == pytest.approx([3.0] * 6)
        assert 3.0 / driver.state.devices[1].batches["a"].step_s() == pytest.approx(120)

    def test_another_longest_turn_holds_from_the_next_round(self) -> None:
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
        driver.end_turn(1)
        driver.send(e.QuotaMaxSet(1.5))
        quotas_s = []
        for _ in range(8):
            quotas_s.append(driver.quota_s(1))
            driver.end_turn(1)
        assert quotas_s[0] == pytest.approx(3.0)
        assert quotas_s[-3:] == pytest.approx([1.5] * 3)

    @pytest.mark.parametrize(
        ("steps_s", "switch_s", "quota_max_s", "expected"),
        [
            ((0.025, 0.025, 0.025), 1.0, 4.0, (4.0, 4.0, 4.0)),  # C5
            ((0.025, 0.0125, 0.02), 0.5, 4.0, (4.0, 2.0, 3.2)),  # C6
            ((0.01, 0.01), 0.5, 4.0, (1 / 3, 1 / 3)),  # C7
        ],
    )
    def test_c5_to_c7(
        self,
        steps_s: tuple[float, ...],
        switch_s: float,
        quota_max_s: float,
        expected: tuple[float, ...],
    ) -> None:
        driver = decode_driver("", quota_max_s=quota_max_s)
        names = [f"m{number}" for number in range(len(steps_s))]
        for name, step_s in zip(names, steps_s, strict=True):
            weight_bytes = int(switch_s * 10 * GB)
            costs = ModelCosts(decode_base_s=step_s)
            driver.send(e.ModelAdded(name, Targets(10.0, 0.1), weight_bytes, 0, costs))
            driver.send(e.Hosted(0, name), e.Hosted(1, name))
        for name in names:
            decode(driver, name, name)
        quotas_s = {}
        for _ in names:
            driver.end_turn(1)
            quotas_s[driver.running(1)] = driver.quota_s(1)
        assert [quotas_s[name] for name in names] == pytest.approx(list(expected))

    def test_batches_take_turns(self) -> None:
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
        assert driver.turns(8, device=1) == list("abcabcab")
        assert driver.state.devices[1].then == "c"

    def test_a_new_batch_joins_in_the_next_round(self) -> None:
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
        assert driver.turns(2, device=1) == ["a", "b"]  # alone, then the first of three
        decode(driver, "d", "d")
        assert driver.turns(8, device=1) == list("bcabcadb")

    def test_the_batch_that_was_announced_is_the_next(self) -> None:
        """The device has made it ready by then, and what was on turn may have had to leave."""
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
            for _ in range(4):
                announced = driver.state.devices[1].then
                driver.end_turn(1)
                assert announced in (None, driver.running(1))

    def test_a_batch_that_ended_loses_its_turn(self) -> None:
        driver = decode_driver()
        for model in "abc":
            decode(driver, model, model)
        driver.turns(2, device=1)
        driver.send(e.Ended("c"))
        assert driver.state.devices[1].then == "a"
        assert driver.turns(4, device=1) == list("baba")

    def test_a_lone_batch_goes_on(self) -> None:
        driver = decode_driver()
        decode(driver, "a", "r")
        assert (driver.quota_s(1), driver.state.devices[1].then) == (3.0, None)

    def test_requests_join_the_batch_of_their_model_or_the_shortest_list(self) -> None:
        driver = decode_driver(num_decode=2)
        places = [(model, decode(driver, model, f"r{n}")) for n, model in enumerate("abcadb")]
        assert places == [("a", 1), ("b", 2), ("c", 1), ("a", 1), ("d", 2), ("b", 2)]

    def test_requests_on_their_way_count(self) -> None:
        driver = decode_driver(num_decode=2)
        targets = []
        for model in "aab":
            driver.arrive(model, f"{model}{driver.num_requests}")
            request_id = list(driver.state.requests)[-1]
            targets += [target for _, _, target in migrations_in(driver.step(0, request_id))]
            driver.end_turn(0)
        assert targets == [1, 1, 2]

    def test_a_batch_grows_no_further_than_its_kv_fits(self) -> None:
        """70 of 80 GB are left beside the weights: 700,000 tokens."""
        driver = decode_driver(num_decode=2)
        tokens = (300_000, 300_000, 99_997, 100)
        assert [decode(driver, "a", f"r{n}", count) for n, count in enumerate(tokens)] == [
            1, 1, 1, 2,
        ]  # fmt: skip

    def test_a_device_that_begins_to_prefill_gives_its_answers_away(self) -> None:
        driver = decode_driver(num_decode=2)
        decode(driver, "a", "r1")
        assert decode(driver, "b", "r2") == 2
        migrations = migrations_in(driver.send(e.DeviceDown(0), e.Tick()))
        assert migrations == [("r1", 1, 2)]
        roles = [one.role for one in driver.state.devices.values()]
        assert roles == [Role.PREFILL, Role.DECODE]
        driver.arrive("d", "r4")
        assert driver.place("r4") == ("QUEUED", 1)  # the turn of a has not ended
        driver.end_turn(1)
        assert driver.place("r4") == ("SENT", 1)


class TestOneDevice:
    """It prefills and decodes, as does a prefill device that cannot hand its answers over."""

    def lone(self) -> Driver:
        driver = Driver(AegaeonPolicy(num_prefill=1))
        driver.send(e.Tick())
        return driver

    def test_a_turn_that_prefills_is_as_long_as_its_prompts_take(self) -> None:
        driver = self.lone()
        driver.arrive("a", "a1")
        assert driver.quota_s() == pytest.approx(0.1)
        driver.arrive("a", "a2", at_s=0.05)
        assert driver.quota_s() == pytest.approx(0.05 + 2 * 0.1)

    def test_an_answer_gives_way_to_the_prompt_of_another_model(self) -> None:
        driver = self.lone()
        driver.arrive("a", "a1")
        driver.step(0, "a1")
        assert runs(driver.arrive("b", "b1", at_s=1.5)) == [(0, "a", "b")]
        assert driver.quota_s() < 1.5  # it is used up: the device ends the turn at once
        driver.end_turn(at_s=1.5)
        assert driver.running() == "b"
        assert driver.quota_s() == pytest.approx(0.1)
        driver.step(0, "b1")
        driver.end_turn(at_s=2.0)
        assert [driver.running(), *driver.turns(4)[1:]] == list("abab")

    @given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.data())
    def test_the_model_that_was_announced_is_the_next(
        self, story: str, data: st.DataObject
    ) -> None:
        driver = self.lone()
        for model in story:
            driver.arrive(model)
            for _ in range(data.draw(st.integers(0, 3))):
                device = driver.state.devices[0]
                for request in list(device.working[driver.running() or ""].requests.values()):
                    driver.step(0, request.id)
                announced = device.then
                driver.end_turn(at_s=driver.now_s + driver.quota_s())
                assert announced in (None, driver.running())


def test_a_model_without_a_prefill_device_is_served_where_it_is() -> None:
    driver = decode_driver("a", num_decode=1)
    driver.send(e.Unhosted(0, "a"), e.Unhosted(1, "a"))
    driver.arrive("a", "r")
    assert driver.place("r") == ("HELD", None)
    driver.send(e.Hosted(1, "a"))  # it decodes, but no other has the model
    assert driver.place("r") == ("SENT", 1)
    driver.send(e.DeviceDown(0), e.Tick())
    assert driver.state.devices[1].role is Role.MIXED


assert COSTS.decode_base_s == 0.025  # what the examples above take for granted
