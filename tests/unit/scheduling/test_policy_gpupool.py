"""The default policy: the order of planned turns against brute force, nobody starves, placement."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.planned_turns import PlannedTurn, Tuning, order_planned_turns
from tests.unit.scheduling.driver import GB, STEP_S, Driver, runs


def planned_turn(
    model: str, due_in_s: float, duration_s: float = 1.0, tokens: float = 1.0
) -> PlannedTurn:
    return PlannedTurn(model, due_in_s, duration_s, duration_s, tokens)


def names(planned_turns: list[PlannedTurn]) -> str:
    return "".join(one.model for one in planned_turns)


def is_on_time(order: tuple[PlannedTurn, ...], start_in_s: float) -> bool:
    at_s = start_in_s
    for one in order:
        if at_s > one.due_in_s:
            return False
        at_s += one.duration_s
    return True


def best_tokens(planned_turns: list[PlannedTurn], start_in_s: float) -> float:
    """The most that any choice and order of planned turns, each on time, is worth."""
    return max(
        sum(one.tokens_in_time for one in order)
        for count in range(len(planned_turns) + 1)
        for order in itertools.permutations(planned_turns, count)
        if is_on_time(order, start_in_s)
    )


DUES_S = st.lists(st.integers(-1, 8), min_size=1, max_size=5)
START_IN_S = st.integers(0, 3)


class TestOrder:
    @given(st.lists(st.tuples(st.integers(-1, 12), st.integers(1, 4)), max_size=6), START_IN_S)
    def test_if_all_can_be_met_by_deadline_they_go_by_deadline(
        self, pairs: list[tuple[int, int]], start_in_s: int
    ) -> None:
        planned_turns = [
            planned_turn(str(n), due_s, length_s) for n, (due_s, length_s) in enumerate(pairs)
        ]
        by_deadline = sorted(planned_turns, key=lambda one: (one.due_in_s, one.model))
        order = order_planned_turns(planned_turns, start_in_s)
        assert sorted(names(order)) == sorted(names(planned_turns))
        if is_on_time(tuple(by_deadline), start_in_s):
            assert order == by_deadline

    @given(DUES_S, START_IN_S)
    def test_planned_turns_of_equal_length_all_go_by_deadline_if_any_order_meets_all(
        self, dues_s: list[int], start_in_s: int
    ) -> None:
        planned_turns = [planned_turn(str(number), due_s) for number, due_s in enumerate(dues_s)]
        if best_tokens(planned_turns, start_in_s) == len(planned_turns):
            dues = [one.due_in_s for one in order_planned_turns(planned_turns, start_in_s)]
            assert dues == sorted(dues_s)

    @given(
        st.lists(st.tuples(st.integers(-1, 6), st.integers(1, 9)), min_size=1, max_size=5),
        START_IN_S,
    )
    def test_of_planned_turns_of_equal_length_the_most_valuable_are_on_time(
        self, pairs: list[tuple[int, int]], start_in_s: int
    ) -> None:
        planned_turns = [
            planned_turn(str(n), due_s, tokens=tokens) for n, (due_s, tokens) in enumerate(pairs)
        ]
        order = order_planned_turns(planned_turns, start_in_s)
        worth = max(
            sum(one.tokens_in_time for one in order[:count])
            for count in range(len(order) + 1)
            if is_on_time(tuple(order[:count]), start_in_s)
        )
        assert worth == best_tokens(planned_turns, start_in_s)

    def test_the_least_dense_is_put_off(self) -> None:
        rich, poor = planned_turn("r", 0.5, 1.0, 100.0), planned_turn("p", 0.0, 1.0, 10.0)
        assert names(order_planned_turns([rich, poor])) == "rp"
        dense, long = planned_turn("d", 0.5, 1.0, 50.0), planned_turn("l", 0.0, 10.0, 100.0)
        assert names(order_planned_turns([dense, long])) == "dl"

    def test_those_put_off_go_by_density_and_those_without_a_deadline_too(self) -> None:
        late = [
            planned_turn(name, -1.0, tokens=tokens) for name, tokens in (("a", 1.0), ("b", 3.0))
        ]
        never = planned_turn("n", math.inf, tokens=2.0)
        assert names(order_planned_turns([*late, never, planned_turn("x", 5.0)])) == "xban"

    def test_equals_go_by_name(self) -> None:
        planned_turns = [planned_turn(name, 5.0) for name in "cab"]
        assert names(order_planned_turns(planned_turns)) == "abc"
        assert order_planned_turns([]) == []

    def test_nobody_is_put_off_in_vain(self) -> None:
        small = planned_turn("s", 0.0, 0.2, 0.1)
        long = planned_turn("l", 0.2, 10.0, 50.0)
        too_late_anyhow = planned_turn("n", 1.0, 1.0, 3.0)
        assert names(order_planned_turns([small, long, too_late_anyhow])) == "sln"


def driver_of(
    models: str = "a b c",
    num_devices: int = 1,
    tuning: Tuning | None = None,
    weight_bytes: int = 10 * GB,
) -> Driver:
    return Driver(GpupoolPolicy(tuning), models, num_devices, weight_bytes=weight_bytes)


class TestTurns:
    def test_the_earliest_deadline_gets_the_first_turn(self) -> None:
        driver = driver_of("a b c d")
        driver.arrive("d", at_s=0.0)
        for number, model in enumerate("cab", start=1):
            driver.arrive(model, at_s=float(number))
        driver.end_turn()
        assert driver.running() == "d"  # its deadline is still the earliest
        driver.send(e.Ended("r1"))
        assert driver.turns(4)[1] == "c"

    def test_a_model_that_is_ahead_gives_way(self) -> None:
        driver = driver_of()
        driver.arrive("a", "r")
        driver.arrive("b")
        driver.step(0, "r", num_tokens=50)
        driver.end_turn(at_s=1.0)
        assert driver.running() == "b"
        assert driver.state.devices[0].then == "a"

    def test_a_lone_model_has_nobody_after_it(self) -> None:
        driver = driver_of()
        driver.arrive("a")
        assert driver.state.devices[0].then is None
        assert runs(driver.arrive("a")) == []

    def test_a_turn_makes_first_tokens_and_is_not_longer_than_allowed(self) -> None:
        tuning = Tuning()
        driver = driver_of(tuning=tuning)
        driver.arrive("a", prompt_tokens=10)
        driver.arrive("a", prompt_tokens=10)
        driver.arrive("b")
        for _ in range(4):
            device = driver.state.devices[0]
            prefill_s = device.batches[driver.running() or ""].prefill_s()
            assert 0 < prefill_s < driver.quota_s() <= prefill_s + tuning.turn_max_s + 1e-9
            driver.end_turn(at_s=driver.now_s + driver.quota_s())

    def test_another_longest_turn_holds_from_the_next(self) -> None:
        driver = driver_of()
        for model in "ab":
            driver.arrive(model)
        before_s = driver.quota_s()
        driver.send(e.QuotaMaxSet(0.25))
        assert driver.quota_s() == before_s
        for _ in range(3):
            driver.end_turn(at_s=driver.now_s + driver.quota_s())
            device = driver.state.devices[0]
            prefill_s = device.batches[driver.running() or ""].prefill_s()
            assert driver.quota_s() <= prefill_s + 0.25 + 1e-9 < before_s

    def test_planned_turns_follow_observed_steps(self) -> None:
        """A slower model needs more time to get as far ahead."""

        def quota_s(step_s: float) -> float:
            driver = driver_of()
            driver.send(e.MemoryChanged(0, (("a", 0), ("b", 0))))  # no switch to pay for
            driver.arrive("a", "r")
            for _ in range(200):
                driver.step(0, "r", step_s=step_s, num_tokens=0)
            driver.send(e.TurnEnded(0, 1), at_s=9.0)
            assert driver.running() == "a"
            return driver.quota_s()

        assert quota_s(0.01) < quota_s(0.03)

    @pytest.mark.parametrize("step_s", [0.0, 1e-300, 1e6])
    def test_absurd_steps_do_no_harm(self, step_s: float) -> None:
        driver = driver_of()
        driver.arrive("a", "r")
        driver.arrive("b")
        for _ in range(1000):
            driver.core.handle([e.Stepped(0, "a", ("r",), 0, step_s)], 0.0)
        for _ in range(4):
            driver.end_turn(at_s=driver.now_s + 1.0)
            assert 0 < driver.quota_s() < math.inf

    def test_new_targets_count_for_requests_under_way(self) -> None:
        driver = driver_of()
        driver.arrive("c")
        driver.arrive("a", at_s=1.0)
        driver.arrive("b", at_s=1.0)
        assert driver.state.devices[0].then == "a"
        driver.send(e.TargetsChanged("b", Targets(5.0, 0.1)))
        driver.end_turn()
        assert driver.running() == "b"


PATIENT = replace(Tuning(), patience_s=5.0, starvation_share=0.2, turn_max_s=1.0)


def planned_turns_of(
    expired: str, rivals: str, step_s: float = 0.02, until_s: float = 600.0
) -> list[tuple[float, str, float]]:
    """Start, model and length of each turn on a device that the rivals alone keep busy."""
    costs = ModelCosts(prefill_base_s=0.0, prefill_token_s=0.0, decode_base_s=step_s)
    models = " ".join((*expired, *rivals))
    driver = driver_of(models, tuning=PATIENT, weight_bytes=1 * GB)
    for model in models.split():
        driver.send(e.ModelAdded(model, Targets(10.0, 0.1), GB, 1, costs))
    for model in rivals:
        driver.arrive(model, model)
    for model in expired:
        driver.send(e.Arrived(model, model, -1000.0, 10))
    planned_turns = []
    while driver.now_s < until_s:
        served, quota_s = driver.running(), driver.quota_s()
        assert served is not None
        planned_turns.append((driver.now_s, served, quota_s))
        driver.step(0, served, num_tokens=max(1, int(quota_s / step_s)))
        driver.end_turn(at_s=driver.now_s + quota_s)
    return [*planned_turns, (driver.now_s, "", 0.0)]


def longest_wait_s(planned_turns: list[tuple[float, str, float]], model: str) -> float:
    """The longest time without a turn of the model."""
    mine = [
        (start_s, start_s + length_s) for start_s, name, length_s in planned_turns if name == model
    ]
    starts_s = [start_s for start_s, _ in mine] + [planned_turns[-1][0]]
    ends_s = [0.0] + [end_s for _, end_s in mine]
    return max(start_s - end_s for start_s, end_s in zip(starts_s, ends_s, strict=True))


class TestStarvation:
    # The pause after a turn for a starving model, of at most 1 s and a prompt here.
    PAUSE_S = (PATIENT.turn_max_s + 0.1) / PATIENT.starvation_share
    TURN_S = PATIENT.turn_max_s + 0.1

    def test_an_expired_batch_gets_a_turn_before_long(self) -> None:
        planned_turns = planned_turns_of("h", "xy")
        limit_s = max(PATIENT.patience_s, self.PAUSE_S) + self.TURN_S
        assert longest_wait_s(planned_turns, "h") <= limit_s

    def test_expired_batches_do_not_take_over_in_overload(self) -> None:
        """The rivals need 120 % and turn expired in time: then all five share alike."""
        planned_turns = planned_turns_of("ghi", "xy", 0.06)
        merciful_s = sum(length_s for _, model, length_s in planned_turns if model in "ghi")
        assert 0 < merciful_s < 0.5 * planned_turns[-1][0]

    @pytest.mark.parametrize("step_s", [0.02, 0.06])  # the rivals need 40 % of the device; 120 %
    def test_every_expired_batch_gets_a_turn(self, step_s: float) -> None:
        planned_turns = planned_turns_of("ghi", "xy", step_s)
        limit_s = PATIENT.patience_s + 5 * (self.PAUSE_S + self.TURN_S)
        assert max(longest_wait_s(planned_turns, model) for model in "ghixy") <= limit_s


class TestPlacement:
    """Where a request is put; it is sent there when its model's turn comes."""

    def device_of(self, driver: Driver, model: str, request_id: str = "") -> int | None:
        driver.arrive(model, request_id or model)
        return driver.place(request_id or model)[1]

    def test_joins_the_device_that_serves_the_model(self) -> None:
        driver = driver_of("a b c d", num_devices=2)
        assert [self.device_of(driver, model) for model in "ab"] == [0, 1]
        driver.send(e.Ended("a"))
        assert self.device_of(driver, "b", "second") == 1
        assert driver.place("second")[0] == "SENT"

    def test_a_new_model_goes_where_the_least_is_to_do(self) -> None:
        driver = driver_of("a b c d", num_devices=3)
        assert [self.device_of(driver, model) for model in "abc"] == [0, 1, 2]
        driver.send(e.Ended("b"))
        assert self.device_of(driver, "d") == 1

    def test_among_equals_where_it_is_resident(self) -> None:
        driver = driver_of(num_devices=3)
        driver.send(e.MemoryChanged(2, (("a", 0),)))
        assert self.device_of(driver, "a") == 2

    def test_comes_home_among_equals(self) -> None:
        driver = driver_of(num_devices=2)
        assert [self.device_of(driver, model) for model in "ba"] == [0, 1]
        driver.send(e.Ended("a"), e.Ended("b"))
        assert self.device_of(driver, "a") == 1
        driver.send(e.Ended("a"), e.DeviceDown(1))
        assert self.device_of(driver, "a") == 0
        driver.send(e.DeviceUp(1, 80 * GB, GB), *(e.Hosted(1, model) for model in "abc"))
        driver.send(e.Ended("a"))
        assert self.device_of(driver, "a") == 0  # the new home

    def test_without_a_host_it_waits(self) -> None:
        driver = driver_of(num_devices=0)
        driver.arrive("a", "r")
        assert driver.place("r") == ("HELD", None)


assert STEP_S < 0.1  # what the examples above take for granted
