"""Requests wait for KV room before they are sent: who, for how long, and who goes first."""

from __future__ import annotations

import math

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.aegaeon import AegaeonPolicy
from gpupoold.scheduling.policies.base import Policy
from gpupoold.scheduling.policies.baselines import (
    DecodeFirstPolicy,
    PrefillFirstPolicy,
    RequestLevelPolicy,
)
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.state import DeviceState, Model, Request, State
from tests.unit.scheduling.driver import COSTS, GB, Driver, migrations_in, runs, sends
from tests.unit.scheduling.test_core import Prefills

MB = 10**6


def driver_of(
    policy: Policy | None = None,
    num_devices: int = 1,
    *,
    kv_host_bytes: int | None = 0,
    models: str = "a b c",
) -> Driver:
    """Devices with room for 2,000 tokens of KV beside the weights of any model.

    A prompt takes its tokens and 272 more: a mean answer of 256 and a block of 16.
    """
    return Driver(
        policy,
        models,
        num_devices,
        weight_bytes=10 * GB,
        kv_bytes_per_token=MB,
        capacity_bytes=12 * GB,
        kv_host_bytes=kv_host_bytes,
    )


def ended(driver: Driver, request_id: str) -> list[tuple[str, int]]:
    return sends(driver.send(e.Ended(request_id)))


def num_waiting(driver: Driver, device: int = 0) -> int:
    return driver.state.devices[device].num_waiting_for_kv


class TestRoom:
    def test_what_does_not_fit_waits_until_something_has_ended(self) -> None:
        driver = driver_of()
        places = [sends(driver.arrive("a", prompt_tokens=700)) for _ in range(4)]
        assert places == [[("r1", 0)], [("r2", 0)], [], []]
        assert driver.place("r3") == ("QUEUED", 0)
        assert num_waiting(driver) == 2
        assert ended(driver, "r1") == [("r3", 0)]
        assert num_waiting(driver) == 1
        assert ended(driver, "r4") == []
        assert num_waiting(driver) == 0

    def test_an_eighth_of_host_memory_is_not_counted_on(self) -> None:
        for num_mb, is_sent in ((1040, False), (1050, True)):  # 916 MB are missing
            driver = driver_of(kv_host_bytes=num_mb * MB)
            driver.arrive("a", prompt_tokens=700)
            driver.arrive("b", prompt_tokens=700)
            assert bool(sends(driver.arrive("c", prompt_tokens=700))) is is_sent

    def test_a_device_that_does_not_say_takes_all(self) -> None:
        driver = driver_of(kv_host_bytes=None)
        for number in range(1, 9):
            assert sends(driver.arrive("a", prompt_tokens=5000)) == [(f"r{number}", 0)]

    def test_a_single_request_always_runs(self) -> None:
        driver = driver_of()
        assert sends(driver.arrive("a", prompt_tokens=9000)) == [("r1", 0)]
        assert sends(driver.arrive("a", prompt_tokens=9000)) == []
        assert sends(driver.arrive("b", prompt_tokens=1)) == []
        assert ended(driver, "r1") == [("r3", 0)]
        assert ended(driver, "r3") == [("r2", 0)]

    def test_the_largest_model_with_work_takes_its_weights_away_from_kv(self) -> None:
        driver = driver_of()
        driver.send(
            e.ModelAdded("large", Targets(), 11 * GB + 500 * MB, MB, COSTS), e.Hosted(0, "large")
        )
        driver.arrive("a", "a1", prompt_tokens=100)
        assert sends(driver.arrive("large", "l1", prompt_tokens=100)) == []  # 744 in 500
        assert sends(driver.arrive("b", "b1", prompt_tokens=10)) == []  # the large one is first
        assert ended(driver, "a1") == [("l1", 0)]
        assert ended(driver, "l1") == [("b1", 0)]

    def test_a_request_that_lost_its_device_needs_room_for_its_tokens_too(self) -> None:
        driver = driver_of()
        driver.arrive("a", "r1", prompt_tokens=500)
        driver.arrive("a", "r2", prompt_tokens=500)
        driver.step(0, "r1", num_tokens=900)
        up = e.DeviceUp(1, 12 * GB, GB, kv_host_bytes=0)
        assert sends(driver.send(e.DeviceDown(0), up, e.Hosted(1, "a"))) == [("r1", 1)]
        assert driver.place("r2") == ("QUEUED", 1)


class TestOrder:
    def test_within_a_model_nobody_passes(self) -> None:
        driver = driver_of()
        for name, tokens in (("r1", 700), ("r2", 700), ("large", 1500), ("small", 10)):
            driver.arrive("a", name, prompt_tokens=tokens)
        assert ended(driver, "r1") == []
        assert ended(driver, "r2") == [("large", 0)]
        assert ended(driver, "large") == [("small", 0)]

    def test_requests_that_can_be_on_time_go_before_late_ones(self) -> None:
        driver = driver_of()
        for name in ("r1", "r2", "late"):
            driver.arrive("a", name, prompt_tokens=700)
        driver.arrive("a", "on-time", prompt_tokens=700, at_s=11.0)
        assert num_waiting(driver) == 2
        assert ended(driver, "r1") == [("on-time", 0)]
        assert ended(driver, "r2") == [("late", 0)]

    def test_a_late_request_that_was_not_sent_gives_its_memory_back(self) -> None:
        driver = driver_of(GpupoolPolicy())
        driver.arrive("a", "a1", prompt_tokens=700)
        driver.arrive("b", "b1", prompt_tokens=700)
        assert (driver.place("b1"), num_waiting(driver)) == (("QUEUED", 0), 0)
        driver.arrive("b", "b2", prompt_tokens=700, at_s=11.0)
        line = driver.state.devices[0].waiting_for_kv["b"]
        assert (list(line.requests), driver.place("b2")) == (["b1"], ("QUEUED", 0))

    def test_a_starving_request_goes_first_again(self) -> None:
        driver = driver_of()
        for name in ("r1", "r2", "old"):
            driver.arrive("a", name, prompt_tokens=700)
        driver.arrive("a", "on-time", prompt_tokens=700, at_s=60.5)
        assert ended(driver, "r1") == [("old", 0)]
        assert ended(driver, "r2") == [("on-time", 0)]

    def test_the_model_with_the_least_kv_goes_first(self) -> None:
        driver = driver_of()
        for number in range(50):
            driver.arrive("a", f"a{number}", prompt_tokens=700)
        assert sends(driver.arrive("b", "b0", prompt_tokens=700)) == []
        assert ended(driver, "a0") == [("b0", 0)]
        assert ended(driver, "a1") == [("a2", 0)]

    def test_a_small_one_of_another_model_does_not_pass_either(self) -> None:
        driver = driver_of()
        driver.arrive("a", "a1", prompt_tokens=700)
        driver.arrive("b", "large", at_s=1.0, prompt_tokens=1500)
        assert sends(driver.arrive("c", "small", at_s=2.0, prompt_tokens=10)) == []
        assert ended(driver, "a1") == [("large", 0)]
        assert ended(driver, "large") == [("small", 0)]

    def test_who_is_first_stays_first_until_there_is_room(self) -> None:
        driver = driver_of()
        for number in range(9):
            driver.arrive("a", f"a{number}", prompt_tokens=700)
        driver.arrive("b", "large", at_s=1.0, prompt_tokens=1500)
        assert ended(driver, "a0") == []
        assert sends(driver.arrive("c", "small", at_s=2.0, prompt_tokens=10)) == []
        # Now no model has any KV, and of those that wait a2 came first.
        assert ended(driver, "a1") == [("large", 0)]
        assert ended(driver, "large") == [("a2", 0), ("small", 0)]

    def test_when_the_first_is_aborted_the_next_is_not_held_back(self) -> None:
        driver = driver_of()
        driver.arrive("a", "a1", prompt_tokens=700)
        driver.arrive("b", "large", at_s=1.0, prompt_tokens=1500)
        driver.arrive("c", "c1", at_s=2.0, prompt_tokens=700)
        assert ended(driver, "large") == [("c1", 0)]

    def test_a_model_that_fills_the_device_is_in_nobodys_way(self) -> None:
        driver = driver_of(kv_host_bytes=8 * GB)
        places = [sends(driver.arrive("a", prompt_tokens=700)) for _ in range(3)]
        assert places[2] == []  # two have all that fits beside a's weights
        assert sends(driver.arrive("b", "b1", prompt_tokens=1700)) == [("b1", 0)]
        assert ended(driver, "r1") == [("r3", 0)]

    def test_an_end_may_let_several_in(self) -> None:
        driver = driver_of()
        driver.arrive("a", "large", prompt_tokens=1500)
        for name in ("s1", "s2", "s3"):
            driver.arrive("a", name, prompt_tokens=700)
        assert ended(driver, "large") == [("s1", 0), ("s2", 0)]


class TestGrowth:
    def test_room_is_kept_for_a_mean_answer_or_half_of_one_more(self) -> None:
        model = Model("a", Targets(), 1, 10, COSTS)
        assert model.kv_need_bytes(2, 500, 500, 200) == 10 * (500 + 200 + 2 * 16)
        assert model.kv_need_bytes(2, 500, 600, 200) == 10 * (600 + 100 + 2 * 16)
        assert model.kv_need_bytes(2, 500, 900, 200) == 10 * (900 + 100 + 2 * 16)

    def test_how_long_answers_are_is_learnt_by_length_of_prompt(self) -> None:
        driver = driver_of()
        for _ in range(100):
            for prompt_tokens, num_tokens in ((100, 20), (400, 60)):
                driver.arrive("a", "r", prompt_tokens=prompt_tokens)
                driver.step(0, "r", num_tokens=num_tokens)
                driver.send(e.Ended("r"))
        driver.arrive("a", "unanswered", prompt_tokens=100)
        driver.send(e.Ended("unanswered"))
        expected = {}
        for prompt_tokens in (100, 400, 2000):
            driver.arrive("a", f"r{prompt_tokens}", prompt_tokens=prompt_tokens)
            expected[prompt_tokens] = driver.state.requests[f"r{prompt_tokens}"].expected_tokens
        # All: (100 * 20 + 100 * 60 + 8 * 256) / 208 = 48.3; then (2000 + 8 * 48.3) / 108.
        assert expected == {100: 22, 400: 59, 2000: 48}
        assert len(driver.state.lengths.recent("a")) == 200

    def test_short_answers_let_more_requests_in(self) -> None:
        driver = driver_of()
        for _ in range(300):
            driver.arrive("a", "r", prompt_tokens=384)
            driver.step(0, "r")
            driver.send(e.Ended("r"))
        # The last 256 answers had one token: 384 + 2 + 16 each, so that four fit into 2,000.
        places = [sends(driver.arrive("a", prompt_tokens=384)) for _ in range(6)]
        assert [bool(place) for place in places] == [True] * 4 + [False] * 2

    def test_who_has_grown_into_the_room_of_a_queued_request_makes_it_wait(self) -> None:
        driver = driver_of(GpupoolPolicy())
        driver.arrive("a", "a1", prompt_tokens=700)
        assert runs(driver.arrive("b", "b1", prompt_tokens=700)) == [(0, "a", "b")]
        assert num_waiting(driver) == 0
        driver.step(0, "a1", num_tokens=600)
        assert runs(driver.end_turn(at_s=1.0)) == [(0, "a", None)]
        assert driver.place("b1") == ("QUEUED", 0)
        assert num_waiting(driver) == 1
        assert ended(driver, "a1") == []
        actions = driver.end_turn()
        assert (sends(actions), runs(actions)) == ([("b1", 0)], [(0, "b", None)])

    def test_who_waits_again_keeps_its_place(self) -> None:
        driver = driver_of(DecodeFirstPolicy())
        driver.arrive("a", "a1", prompt_tokens=400)
        for name in ("b1", "b2", "b3"):
            driver.arrive("b", name, prompt_tokens=300)
        assert num_waiting(driver) == 1
        driver.step(0, "a1", num_tokens=900)
        driver.end_turn()
        assert num_waiting(driver) == 3
        assert ended(driver, "a1") == [("b1", 0), ("b2", 0), ("b3", 0)]


class TestTurns:
    @pytest.mark.parametrize(
        "policy", [GpupoolPolicy(), PrefillFirstPolicy(), DecodeFirstPolicy(), None]
    )
    def test_a_model_gets_no_turn_as_long_as_it_only_waits(self, policy: Policy | None) -> None:
        driver = driver_of(policy)
        driver.arrive("a", "a1", prompt_tokens=700)
        driver.step(0, "a1")
        assert runs(driver.arrive("b", "b1", prompt_tokens=1500)) == []
        assert driver.turns(4, each_s=1.0) == ["a"] * 4
        assert driver.state.devices[0].then is None
        driver.send(e.Ended("a1"))
        driver.end_turn()
        assert driver.running() == "b"
        assert driver.place("b1") == ("SENT", 0)

    def test_aegaeon_goes_on_with_a_group_that_has_room(self) -> None:
        driver = driver_of(AegaeonPolicy(1))  # without a device to decode on
        for name in ("a1", "a2", "a3"):
            driver.arrive("a", name, prompt_tokens=700)
        for name in ("a1", "a2"):
            driver.step(0, name)
        assert sends(driver.arrive("b", "b1", prompt_tokens=700)) == []
        assert num_waiting(driver) == 2
        assert driver.turns(3) == ["a"] * 3
        assert driver.state.devices[0].then is None
        assert ended(driver, "a1") == []
        assert driver.turns(2) == ["a", "b"]
        assert driver.place("b1") == ("SENT", 0)
        assert driver.place("a3") == ("QUEUED", 0)


class TestElsewhere:
    def test_another_device_with_room_is_better_than_to_wait(self) -> None:
        for policy in (GpupoolPolicy(), PrefillFirstPolicy(), RequestLevelPolicy("request-level")):
            driver = driver_of(policy, num_devices=2)
            for name in ("a1", "a2", "a3", "a4"):
                driver.arrive("a", name, prompt_tokens=700)
            assert sorted(driver.place(f"a{n}") for n in (1, 2, 3, 4)) == [
                ("SENT", 0), ("SENT", 0), ("SENT", 1), ("SENT", 1),
            ]  # fmt: skip

    @pytest.mark.parametrize("policy", [GpupoolPolicy(), PrefillFirstPolicy()])
    def test_who_waits_goes_where_room_comes_first(self, policy: Policy) -> None:
        driver = driver_of(policy, num_devices=2)
        driver.arrive("a", "a1", prompt_tokens=1500)
        driver.arrive("b", "b1", prompt_tokens=1500)
        place = {driver.place("a1")[1], driver.place("b1")[1]}
        assert place == {0, 1}
        driver.arrive("c", "c1", prompt_tokens=200)
        driver.arrive("c", "c2", prompt_tokens=100)
        assert {driver.place(name)[0] for name in ("c1", "c2")} == {"QUEUED"}
        other = 1 - (driver.place("c1")[1] or 0)
        at_other = next(name for name in ("a1", "b1") if driver.place(name)[1] == other)
        driver.send(e.Ended(at_other))
        driver.end_turn(other)
        assert driver.place("c1") == driver.place("c2") == ("SENT", other)

    def test_who_waits_goes_to_its_model_on_another_device(self) -> None:
        driver = driver_of(GpupoolPolicy(), num_devices=2)
        for number in range(5):
            driver.arrive("a", f"a{number}", prompt_tokens=700)
        phase, device = driver.place("a4")
        assert phase == "QUEUED"
        others = [name for name in ("a0", "a1", "a2", "a3") if driver.place(name)[1] != device]
        assert ended(driver, others[0]) == [("a4", 1 - (device or 0))]

    def test_a_loaded_device_is_no_place_for_a_second_copy(self) -> None:
        driver = driver_of(GpupoolPolicy(), num_devices=2)
        for name in ("a1", "a2"):
            driver.arrive("a", name, prompt_tokens=700)
        driver.send(e.TargetsChanged("b", Targets(10.0, 0.03)))  # needs 25 of every 30 ms
        driver.arrive("b", "b1")
        assert driver.place("b1") == ("SENT", 1)
        driver.arrive("a", "a3", prompt_tokens=700)
        assert driver.place("a3") == ("QUEUED", 0)
        assert num_waiting(driver) == 1

    def test_without_room_anywhere_the_shorter_line_is_joined(self) -> None:
        driver = driver_of(GpupoolPolicy(), num_devices=2, models="a b c d")
        for model in "ab":
            driver.arrive(model, prompt_tokens=1700)
        driver.arrive("c", "c1", prompt_tokens=700)
        driver.arrive("d", "d1", prompt_tokens=700)
        assert (num_waiting(driver, 0), num_waiting(driver, 1)) == (1, 1)

    def test_without_room_anywhere_a_model_waits_in_one_place(self) -> None:
        driver = driver_of(GpupoolPolicy(), num_devices=2)
        for model in "ab":
            driver.arrive(model, prompt_tokens=1700)
        for _ in range(3):
            driver.arrive("c", prompt_tokens=700)
        assert sorted((num_waiting(driver, 0), num_waiting(driver, 1))) == [0, 3]

    def test_fewer_requests_are_not_more_room(self) -> None:
        driver = driver_of(PrefillFirstPolicy(), num_devices=2)
        driver.arrive("a", "large", prompt_tokens=1700)
        for name in ("r1", "r2", "r3"):
            driver.arrive("b", name, prompt_tokens=10)
            assert driver.place(name) == ("SENT", 1)

    def test_whole_requests_wait_for_any_device(self) -> None:
        driver = driver_of(RequestLevelPolicy("request-level"), num_devices=2)
        driver.arrive("b", "b1", at_s=0.0)
        for number in (1, 2, 3):
            driver.arrive("a", f"a{number}", at_s=float(number), prompt_tokens=700)
        driver.arrive("a", "small", at_s=4.0, prompt_tokens=10)
        assert driver.place("a3") == driver.place("small") == ("HELD", None)
        assert ended(driver, "b1") == [("a3", 0), ("small", 0)]

    def test_no_request_of_a_model_passes_another_that_is_held(self) -> None:
        driver = driver_of(RequestLevelPolicy("request-level", max_live=math.inf))
        for name, tokens in (("a1", 700), ("a2", 700), ("large", 1500), ("small", 10)):
            driver.arrive("a", name, at_s=driver.now_s + 1, prompt_tokens=tokens)
        assert ended(driver, "a1") == []
        assert ended(driver, "a2") == [("large", 0)]

    def test_who_waits_is_not_lost_with_its_device(self) -> None:
        driver = driver_of(num_devices=2)
        for name in ("a1", "a2"):
            driver.arrive("a", name, prompt_tokens=1500)
        assert driver.place("a2") == ("QUEUED", 0)
        driver.send(e.Unhosted(0, "a"))
        assert sorted(driver.place(name) for name in ("a1", "a2")) == [("QUEUED", 1), ("SENT", 1)]
        driver.send(e.DeviceDown(1))
        assert {driver.place(name) for name in ("a1", "a2")} == {("HELD", None)}
        driver.send(e.ModelRemoved("a"))
        assert driver.state.requests == {}


class TestMigrate:
    def test_a_full_device_gets_no_request_by_migrate_either(self) -> None:
        driver = driver_of(Prefills(), num_devices=2)
        driver.arrive("a", "r1", prompt_tokens=1500)
        assert migrations_in(driver.step(0, "r1")) == [("r1", 0, 1)]
        driver.arrive("a", "r2", prompt_tokens=700)
        assert migrations_in(driver.step(0, "r2")) == []
        assert driver.place("r2") == ("DECODING", 0)

    def test_room_that_a_migrate_leaves_is_used(self) -> None:
        driver = driver_of(Prefills(), num_devices=2)
        driver.arrive("a", "r1", prompt_tokens=1500)
        assert sends(driver.arrive("a", "r2", prompt_tokens=1500)) == []
        actions = driver.step(0, "r1")
        assert (migrations_in(actions), sends(actions)) == ([("r1", 0, 1)], [("r2", 0)])

    def test_small_answers_leave_where_large_ones_must_stay(self) -> None:
        driver = driver_of(Prefills(), num_devices=2)
        driver.send(e.RoleSet(0, Role.PREFILL))
        for name, tokens in (("r1", 1200), ("r2", 10)):
            driver.arrive("a", name, prompt_tokens=tokens)
            assert migrations_in(driver.step(0, name)) == [(name, 0, 1)]
        for name, tokens in (("large", 300), ("small", 10)):
            driver.arrive("a", name, prompt_tokens=tokens)
            assert migrations_in(driver.step(0, name)) == []
        assert migrations_in(driver.send(e.Ended("r2"))) == [("small", 0, 1)]

    def test_a_full_device_is_asked_once_for_many_answers(self) -> None:
        policy = CountingPrefills()
        driver = driver_of(policy, num_devices=2)
        driver.send(e.RoleSet(0, Role.PREFILL))
        driver.arrive("a", "r1", prompt_tokens=1500)
        driver.step(0, "r1")
        for name in ("r2", "r3", "r4"):
            driver.arrive("a", name, prompt_tokens=300)
            driver.step(0, name)
        policy.num_asked = 0
        driver.arrive("b", "r5")
        assert policy.num_asked == 0
        driver.send(e.Ended("r4"))
        assert policy.num_asked == 1
        assert driver.place("r2") == driver.place("r3") == ("DECODING", 0)


class CountingPrefills(Prefills):
    """Counts the questions for a device to continue an answer."""

    num_asked = 0

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        self.num_asked += 1
        return super().first_token(request, state, now_s)
