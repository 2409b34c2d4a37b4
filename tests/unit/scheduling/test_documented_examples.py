"""The worked examples of ``docs/internals/scheduling.md``, in its order, with its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.admission import Job, most_on_time
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.aegaeon import MAX_GROUP_SIZE, AegaeonPolicy
from gpupoold.scheduling.policies.base import CannotServe
from gpupoold.scheduling.policies.planned_turns import (
    BatchWork,
    PlannedTurn,
    Switching,
    Tuning,
    order_planned_turns,
    plan_turn,
)
from gpupoold.scheduling.state import Model, Request, RequestPhase
from gpupoold.sim.policies import POLICY_NAMES, make_policy
from tests.unit.scheduling.driver import GB, STEP_S, Driver, migrations_in, sends

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "internals" / "scheduling.md").read_text(
    "utf-8"
)
TARGETS = Targets(10.0, 0.1)


class TestThePage:
    def test_has_an_entry_for_every_policy(self) -> None:
        of_policies = PAGE[PAGE.index("## The policies") : PAGE.index("## Results")]
        entries = re.findall(r"^(?:###|-) `([\w-]+)`", of_policies, re.MULTILINE)
        assert sorted(entries) == sorted(POLICY_NAMES)


class TestWhenKvMemoryIsFull:
    def driver_of(self, kv_host_bytes: int) -> Driver:
        return Driver(
            weight_bytes=10 * GB,
            kv_bytes_per_token=10**6,
            capacity_bytes=12 * GB,
            kv_host_bytes=kv_host_bytes,
        )

    def test_three_models_for_which_there_is_no_room_together(self) -> None:
        driver = self.driver_of(0)
        for number in (1, 2, 3):
            driver.arrive("a", f"a{number}", at_s=float(number), prompt_tokens=700)
        assert driver.state.devices[0].working["a"].kv_need_bytes == 2 * 972 * 10**6
        driver.arrive("b", "b1", at_s=4.0, prompt_tokens=1500)
        driver.arrive("c", "c1", at_s=5.0, prompt_tokens=10)
        waiting = driver.state.devices[0].waiting_for_kv
        assert [list(line.requests) for line in waiting.values()] == [["a3"], ["b1"], ["c1"]]
        assert sends(driver.send(e.Ended("a1"))) == []
        assert sends(driver.send(e.Ended("a2"))) == [("b1", 0)]

    def test_host_cache_counts_by_seven_eighths(self) -> None:
        for prompt_tokens, is_sent in ((2000 + 1225 - 972 - 272, True), (1982, False)):
            driver = self.driver_of(1400 * 10**6)
            driver.arrive("a", prompt_tokens=700)
            assert bool(sends(driver.arrive("b", prompt_tokens=prompt_tokens))) is is_sent


class TestGpupool:
    STEP_S = 0.02

    def planned_turn(self, name: str, num_requests: int, slack_s: float) -> PlannedTurn:
        """Requests of a model that is resident, which have ``slack_s`` until their next token."""
        costs = ModelCosts(decode_base_s=self.STEP_S)
        model = Model(name, TARGETS, GB, 0, costs)
        requests = []
        for number in range(num_requests):
            request = Request(f"{name}{number}", model, 0.0, 100, None, RequestPhase.DECODING, 0, 1)
            requests.append(request)
        now_s = requests[0].next_deadline_s - slack_s
        switching = Switching(Tuning().turn_min_s, is_exposed=False)
        due_s = [one.next_deadline_s for one in requests]
        work = BatchWork(model, requests, due_s, self.STEP_S, 0.0, 0, False, model.speed())
        return plan_turn(work, now_s, 0.0, switching, Tuning())

    def test_three_planned_turns_one_of_which_is_put_off(self) -> None:
        planned_turns = [
            self.planned_turn("a", 4, 1.0),
            self.planned_turn("b", 1, 1.8),
            self.planned_turn("c", 4, 2.6),
        ]
        assert [one.due_in_s for one in planned_turns] == pytest.approx([1.0, 1.8, 2.6])
        assert [one.duration_s for one in planned_turns] == pytest.approx([1.5, 1.3, 1.1])
        assert [one.tokens_in_time for one in planned_turns] == pytest.approx([240, 52, 176])
        assert [one.density for one in planned_turns] == pytest.approx([160, 40, 160])
        assert "".join(one.model for one in order_planned_turns(planned_turns)) == "acb"
        # Without b, c begins in time; b then begins 0.8 s late.
        a, b, c = planned_turns
        assert a.duration_s + b.duration_s == pytest.approx(c.due_in_s + 0.2)
        assert a.duration_s + c.duration_s == pytest.approx(b.due_in_s + 0.8)
        # With a little more time for c, nobody is put off.
        later = [a, b, self.planned_turn("c", 4, 2.9)]
        assert "".join(one.model for one in order_planned_turns(later)) == "abc"

    def test_a_turn_is_cut_short_for_a_strict_newcomer(self) -> None:
        driver = Driver(make_policy("gpupool"), "")
        slow = ModelCosts(decode_base_s=self.STEP_S)
        strict = ModelCosts(prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=self.STEP_S)
        driver.send(
            e.ModelAdded("a", TARGETS, 10 * GB, 0, slow),
            e.ModelAdded("s", Targets(1.0, 0.1), 2 * GB, 0, strict),
        )
        driver.send(e.Hosted(0, "a"), e.Hosted(0, "s"), e.MemoryChanged(0, (("a", 0),)))
        driver.arrive("a", "r", at_s=0.0)
        driver.step(0, "r")
        driver.end_turn(at_s=9.0)
        assert driver.quota_s() == pytest.approx(1.475)
        driver.arrive("s", at_s=9.5)
        assert 9.0 + driver.quota_s() == pytest.approx(9.9)
        assert driver.state.devices[0].then == "s"

    # A step takes 25 ms and 9 ms per request: with nine requests more than the 100 ms of TBT.
    GROWING = ModelCosts(
        prefill_base_s=0.1, prefill_token_s=0.0, decode_base_s=0.025, decode_sequence_s=0.009
    )

    def serve(self, driver: Driver, model: str, count: int, first: int = 0) -> list[int | None]:
        """Requests that have their first token; where each is served."""
        places = []
        for number in range(first, first + count):
            name = f"{model}{number}"
            driver.arrive(model, name)
            places.append(driver.place(name)[1])
            driver.step(places[-1] or 0, name)
        return places

    def test_a_hot_model_gets_a_second_device(self) -> None:
        driver = Driver(make_policy("gpupool"), "a b", 2, costs=self.GROWING)
        assert self.serve(driver, "a", 1) + self.serve(driver, "b", 1) == [0, 1]
        assert self.serve(driver, "a", 10, first=1) == [0] * 8 + [1, 1]

    def test_a_hot_model_gets_a_free_device_earlier(self) -> None:
        driver = Driver(make_policy("gpupool"), "a", 2, costs=self.GROWING)
        assert self.serve(driver, "a", 9) == [0] * 7 + [1, 1]

    def test_a_request_is_bound_late(self) -> None:
        driver = Driver(make_policy("gpupool"), "a b c", 2, costs=self.GROWING)
        assert self.serve(driver, "a", 1) + self.serve(driver, "c", 1) == [0, 1]
        assert self.serve(driver, "a", 7, first=1) == [0] * 7
        assert self.serve(driver, "c", 7, first=1) == [1] * 7
        assert sends(driver.arrive("b", "b")) == []
        assert driver.place("b") == ("QUEUED", 0)
        driver.send(*(e.Ended(f"c{number}") for number in range(8)))
        assert driver.place("b") == ("QUEUED", 1)
        assert sends(driver.end_turn(1)) == [("b", 1)]

    def test_the_second_of_three_prompts_is_deferred(self) -> None:
        jobs = [Job("first", 0.3, 1.0), Job("second", 0.5, 1.02), Job("third", 0.3, 1.05)]
        admission = most_on_time(jobs)
        assert [job.job_id for job in admission.order] == ["first", "third", "second"]
        assert sum(job.duration_s for job in admission.on_time) == pytest.approx(0.6)
        assert [job.job_id for job in admission.late] == ["second"]

    def test_starvation_share_of_a_turn_of_one_and_a_half_seconds(self) -> None:
        tuning = Tuning()
        assert 1.5 / tuning.starvation_share == pytest.approx(50)
        assert tuning.expired_share * TARGETS.ttft_s == pytest.approx(0.02)
        assert tuning.lead_share * TARGETS.ttft_s == pytest.approx(7.0)
        assert tuning.latest_start_share * TARGETS.ttft_s == pytest.approx(2.0)


class TestAegaeon:
    def test_groups_of_eight(self) -> None:
        driver = Driver(AegaeonPolicy(num_prefill=2), "a b", 4)
        driver.send(e.Tick())
        for number in range(9):
            driver.arrive("a", f"a{number + 1}")
        driver.arrive("b", "b1")
        assert MAX_GROUP_SIZE == 8
        assert [driver.place(f"a{number + 1}")[1] for number in range(9)] == [0] * 8 + [1]
        assert driver.place("b1") == ("QUEUED", 1)

    def test_three_batches_in_rounds_of_twelve_seconds(self) -> None:
        driver = Driver(AegaeonPolicy(1, quota_max_s=3.0), "a b c", 2, targets=TARGETS)
        driver.send(e.Tick())
        for model in "abc":
            driver.arrive(model, model)
            assert migrations_in(driver.step(0, model)) == [(model, 0, 1)]
            driver.end_turn(0)
            driver.send(e.Attached(model))
        device = driver.state.devices[1]
        switching_s = sum(batch.model.weight_bytes for batch in device.working.values()) / (
            device.bandwidth_bytes_per_s
        )
        quotas_s = []
        for _ in range(3):
            driver.end_turn(1)
            quotas_s.append(driver.quota_s(1))
        assert switching_s == 3.0
        assert quotas_s == pytest.approx([3.0] * 3)
        round_s = switching_s + sum(quotas_s)
        assert round_s == pytest.approx(12.0)
        assert quotas_s[0] / STEP_S == pytest.approx(120)
        assert round_s / TARGETS.tbt_s == pytest.approx(120)


class TestRequestLevel:
    def test_whole_requests_in_order_of_arrival(self) -> None:
        driver = Driver(make_policy("request-level"), "a b c", 2)
        for at_s, name in enumerate(("a1", "b1", "c1", "a2")):
            driver.arrive(name[0], name, at_s=float(at_s))
        assert {name: driver.place(name) for name in driver.state.requests} == {
            "a1": ("SENT", 0),
            "b1": ("SENT", 1),
            "c1": ("HELD", None),
            "a2": ("SENT", 0),
        }
        assert sends(driver.send(e.Ended("b1"))) == [("c1", 1)]

    def test_four_at_a_time(self) -> None:
        driver = Driver(make_policy("request-level-4"), "a b", 1)
        for number in range(1, 6):
            driver.arrive("a", f"a{number}")
        driver.arrive("b", "b1")
        assert [driver.place(f"a{number}")[0] for number in range(1, 6)] == ["SENT"] * 4 + ["HELD"]
        assert sends(driver.send(e.Ended("a1"))) == [("a5", 0)]
        assert driver.place("b1") == ("HELD", None)

    def test_the_fifth_takes_another_device_that_is_free(self) -> None:
        driver = Driver(make_policy("request-level-4"), "a", 2)
        for number in range(1, 6):
            driver.arrive("a", f"a{number}")
        assert [driver.place(f"a{number}")[1] for number in range(1, 6)] == [0, 0, 0, 0, 1]

    def test_shortest_first(self) -> None:
        driver = Driver(make_policy("request-level-sjf"), "a b c")
        driver.arrive("a", "a1", at_s=0.0, output_tokens=300)
        driver.arrive("b", "b1", at_s=1.0, output_tokens=800)
        driver.arrive("c", "c1", at_s=2.0, output_tokens=50)
        assert sends(driver.send(e.Ended("a1"))) == [("c1", 0)]


def test_static_refuses_the_third_of_three_models() -> None:
    driver = Driver(make_policy("static"), "a b c", weight_bytes=30 * GB)
    with pytest.raises(CannotServe) as refusal:
        driver.core.policy.check(driver.state)
    assert str(refusal.value) == (
        "only 2 of 3 models fit the devices at once: no device has 31.6 GB free for c"
    )


def test_prefill_first_stops_an_answer_at_once() -> None:
    driver = Driver(make_policy("prefill-first"), "a b")
    driver.arrive("a", "a1")
    driver.step(0, "a1")
    driver.end_turn(at_s=1.0)
    assert (driver.running(), driver.quota_s()) == ("a", 4.0)
    driver.arrive("b", "b1", at_s=2.0)
    assert (driver.quota_s(), driver.state.devices[0].then) == (0.0, "b")
    driver.end_turn(at_s=2.025)
    driver.step(0, "b1")
    driver.end_turn(at_s=3.2)
    assert (driver.running(), driver.quota_s()) == ("a", 4.0)


def test_decode_first_lets_prompts_wait_for_the_answer() -> None:
    driver = Driver(make_policy("decode-first"), "a b")
    driver.arrive("a", "a1", at_s=0.0)
    driver.step(0, "a1")
    driver.arrive("b", "b1", at_s=2.0)
    driver.arrive("a", "a2", at_s=4.0)
    assert {driver.place("b1"), driver.place("a2")} == {("QUEUED", 0)}
    assert sends(driver.send(e.Ended("a1"), at_s=20.0)) == [("b1", 0), ("a2", 0)]
