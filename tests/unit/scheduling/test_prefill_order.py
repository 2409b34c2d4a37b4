"""The order of a model's waiting prompts, and how many of them a device gets."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpupoold.domain import Priority, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import prefill_order, time_factor
from gpupoold.scheduling.events import Action, ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.planned_turns import Tuning
from gpupoold.scheduling.state import Batch, Model, Request, Speed
from gpupoold.scheduling.wait_estimate import first_token_in_s, next_token_in_s
from tests.unit.scheduling.driver import Driver, sends

TTFT_S = 1.0
# A prompt of 100 tokens takes 0.1 s, a step 25 ms.
COSTS = ModelCosts(prefill_base_s=0.0, prefill_token_s=0.001, decode_base_s=0.025)


def sent(actions: Iterable[Action]) -> str:
    return " ".join(request_id for request_id, _ in sends(actions))


def names(requests: Iterable[Request]) -> str:
    return " ".join(one.id for one in requests)


class TestOrder:
    model = Model("m", Targets(TTFT_S, 0.1), 10**9, 1000, COSTS)

    def request(
        self, name: str, tokens: int, arrival_s: float = 0.0, priority: Priority = Priority.NORMAL
    ) -> Request:
        return Request(name, self.model, arrival_s, tokens, None, priority=priority)

    def order(self, *requests: Request, start_s: float = 0.0, factor: float = 1.0) -> list[str]:
        prefill_s = sum(COSTS.prefill_s(one.prompt_tokens) for one in requests)
        order = prefill_order(requests, prefill_s, Speed(COSTS), start_s, factor)
        return [names(order.on_time), names(order.late)]

    def test_requests_keep_their_order_while_all_can_be_on_time(self) -> None:
        later, sooner = self.request("later", 300, 0.1), self.request("sooner", 300)
        assert self.order(later, sooner) == ["later sooner", ""]

    def test_the_longest_is_late_and_the_others_go_by_deadline(self) -> None:
        requests = (
            self.request("c", 300, 0.05),
            self.request("a", 300),
            self.request("b", 500, 0.02),
        )
        assert self.order(*requests) == ["a c", "b"]

    def test_expired_requests_are_late(self) -> None:
        requests = self.request("old", 100), self.request("new", 100, 1.0)
        assert self.order(*requests, start_s=1.5) == ["new", "old"]

    def test_answers_between_the_prefills_make_more_late(self) -> None:
        requests = [self.request(name, 250) for name in "abcd"]
        assert self.order(*requests) == ["a b c d", ""]
        on_time, late = self.order(*requests, factor=4 / 3)
        assert (len(on_time.split()), len(late.split())) == (3, 1)

    def test_no_request_is_late_for_one_of_lower_priority(self) -> None:
        requests = (
            self.request("short", 500, priority=Priority.LOW),
            self.request("long", 900),
            self.request("high", 100, priority=Priority.HIGH),
        )
        assert self.order(*requests) == ["high long", "short"]

    def test_requests_on_time_have_the_head_start_of_their_priority(self) -> None:
        requests = (
            self.request("first", 100, -0.5),
            self.request("high", 100, priority=Priority.HIGH),
            self.request("too long", 900, priority=Priority.LOW),
        )
        assert self.order(*requests) == ["high first", "too long"]

    def test_time_factor_is_the_reciprocal_of_the_time_beside_the_answers(self) -> None:
        batch = Batch(self.model)
        assert time_factor(None) == time_factor(batch) == 1.0
        driver = overloaded(0)
        driver.arrive("a", "answer")
        driver.step(0, "answer")
        # A step of 25 ms in 100 ms.
        assert time_factor(driver.state.devices[0].working["a"]) == pytest.approx(4 / 3)


def overloaded(num_prompts: int, patience_s: float = 60.0) -> Driver:
    """One device with the weights of a model, and prompts p0, p1, ... of 0.2 s."""
    policy = GpupoolPolicy(Tuning(patience_s=patience_s))
    driver = Driver(policy, "a", targets=Targets(TTFT_S, 0.1), costs=COSTS)
    driver.send(e.MemoryChanged(0, (("a", 0),)))
    for number in range(num_prompts):
        driver.arrive("a", f"p{number}", prompt_tokens=200)
    return driver


def queued(driver: Driver) -> str:
    return names(driver.state.devices[0].queued_requests())


class TestSending:
    def test_all_are_sent_while_all_can_be_on_time(self) -> None:
        assert queued(overloaded(5)) == ""

    def test_the_device_has_prompts_for_its_next_prefills_only(self) -> None:
        driver = overloaded(0)
        arrivals = [e.Arrived(f"p{number}", "a", 0.0, 200) for number in range(9)]
        # Of equal prompts the first are late: the others have no less time.
        assert sent(driver.send(*arrivals)) == "p4 p5"
        # An answer takes a quarter of the device, so only two more can be on time.
        assert sent(driver.send(e.Stepped(0, "a", ("p4",)), at_s=0.2)) == "p7"
        assert sent(driver.send(e.Stepped(0, "a", ("p5",)), at_s=0.4)) == "p8"

    def test_short_prompts_are_sent_for_a_quarter_of_a_second(self) -> None:
        driver = overloaded(0)
        arrivals = [e.Arrived(f"p{number}", "a", 0.0, 20) for number in range(60)]
        assert len(sent(driver.send(*arrivals)).split()) == 13

    def test_a_newcomer_on_time_goes_before_late_requests(self) -> None:
        driver = overloaded(9)
        late = driver.state.devices[0].queued_requests()
        assert late
        driver.now_s = 3.0  # nobody could be on time now
        ids = [one.id for one in driver.state.devices[0].working["a"].requests.values()]
        driver.arrive("a", "new", prompt_tokens=200)
        actions = [action for one in ids for action in driver.step(0, one)]
        assert sent(actions).split()[0] == "new"

    def test_late_requests_follow_when_no_request_can_be_on_time(self) -> None:
        driver = overloaded(9)
        driver.now_s = 3.0
        while driver.state.devices[0].working["a"].num_waiting:
            batch = driver.state.devices[0].working["a"]
            waiting = [one for one in batch.requests.values() if not one.num_tokens]
            driver.step(0, waiting[0].id)
        assert queued(driver) == ""

    def test_a_starving_request_gets_a_share_of_the_device(self) -> None:
        """Twice as many requests arrive as can be served; every request is on time or old."""
        driver = overloaded(0, patience_s=5.0)
        old: list[int] = []
        for number in range(1000):
            driver.now_s = number * 0.1
            driver.arrive("a", f"p{number}", prompt_tokens=200)
            if number % 2:  # the device takes 0.2 s for each
                first = next(iter(driver.state.devices[0].working["a"].requests.values()))
                waited_s = driver.now_s - first.arrival_s
                assert waited_s < 1.5 or waited_s > 5.0
                if waited_s > 5.0:
                    old.append(int(first.id[1:]))
                driver.step(0, first.id)
                driver.send(e.Ended(first.id))
        assert 0.02 <= len(old) * 0.2 / 95.0 <= 0.035
        assert old == sorted(old)


class TestEstimates:
    def test_a_newcomer_waits_only_for_prompts_on_time(self) -> None:
        driver = overloaded(0)
        driver.send(*(e.Arrived(f"p{number}", "a", 0.0, 200) for number in range(30)))
        driver.now_s = 0.9  # those in the queue are late now
        wait_s = first_token_in_s(driver.state, driver.state.models["a"], 200, 0.9)
        assert wait_s == pytest.approx(3 * 0.2, abs=0.05)  # two are on the device

    def test_a_deferred_request_waits_for_all_on_time_and_those_late_before_it(self) -> None:
        driver = overloaded(0)
        driver.send(*(e.Arrived(f"p{number}", "a", 0.0, 190) for number in range(9)))
        requests = driver.state.requests
        waits_s = {name: next_token_in_s(driver.state, one, 0.0) for name, one in requests.items()}
        assert waits_s["p6"] == pytest.approx(3 * 0.19, abs=0.06)
        assert waits_s["p0"] == pytest.approx(6 * 0.19, abs=0.06)
        assert waits_s["p3"] == pytest.approx(9 * 0.19, abs=0.06)
