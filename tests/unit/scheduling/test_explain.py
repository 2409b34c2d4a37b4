"""Where requests stand, who decided that, and who is before them."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role
from gpupoold.scheduling import events as e
from gpupoold.scheduling.explain import (
    RequestExplanation,
    Standing,
    Turns,
    standing_of,
    turns_of,
    why_request,
)
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.policies.named import POLICY_NAMES, make_policy
from gpupoold.scheduling.rules import Rule
from tests.unit.scheduling.driver import GB, STEP_S, Driver

PREFILL_S = 0.1
SWITCH_S = 1.0


def driver(models: str = "a b c", **more: object) -> Driver:
    told = Driver(GpupoolPolicy(), models, **more)  # type: ignore[arg-type]
    told.tell(e.MemoryChanged(0, tuple((name, 0) for name in models.split())))
    return told


def why(told: Driver, name: str) -> RequestExplanation:
    return why_request(told.state, told.state.requests[name], told.now_s)


def turns(told: Driver, number: int = 0) -> Turns:
    return turns_of(told.core.policy, told.state, told.state.devices[number], told.now_s)


class TestStanding:
    def test_without_a_device(self) -> None:
        told = driver()
        told.tell(e.DeviceDown(0))
        told.arrive("a", "r")
        assert why(told, "r") == RequestExplanation(Standing.NO_DEVICE, None, None, None)

    def test_held_by_a_policy_that_waits_for_a_free_device(self) -> None:
        told = Driver(make_policy("request-level"), "a b")
        told.arrive("a", "first")
        told.arrive("b", "second")
        assert why(told, "first").rule is Rule.FREE_DEVICE
        assert why(told, "second").standing is Standing.HELD
        assert why(told, "second").next_token_in_s is not None

    def test_from_prompt_to_pause(self) -> None:
        told = driver()
        told.arrive("a", "r")
        assert why(told, "r").standing is Standing.PREFILLING
        told.step(0, "r")
        assert why(told, "r").standing is Standing.ON_TURN
        told.arrive("b", "other")
        assert why(told, "other").standing is Standing.WAITS_FOR_TURN
        told.end_turn()
        assert told.running() == "b"
        assert why(told, "r").standing is Standing.PAUSED

    def test_on_its_way(self) -> None:
        told = driver(num_devices=2)
        told.arrive("a", "r")
        told.step(0, "r")
        told.tell(e.DrainSet(0, True))
        assert why(told, "r") == RequestExplanation(
            Standing.MOVING, 1, Rule.ANSWERS_ELSEWHERE, why(told, "r").next_token_in_s
        )
        # Its KV goes out and in, its model has to be brought in there, and it makes a step.
        kv_s = 2 * 101 * 100_000 / (10 * GB)
        expected_s = kv_s + SWITCH_S + STEP_S
        assert why(told, "r").next_token_in_s == pytest.approx(expected_s, rel=0.1)

    def test_for_room_for_kv(self) -> None:
        told = driver("a", capacity_bytes=12 * GB, kv_bytes_per_token=1_000_000, kv_host_bytes=0)
        for number in range(4):
            told.arrive("a", f"r{number}", at_s=float(number), prompt_tokens=700)
        assert [why(told, f"r{number}").standing for number in range(4)] == [
            Standing.PREFILLING,
            Standing.PREFILLING,
            Standing.KV_ROOM,
            Standing.KV_ROOM,
        ]
        assert [why(told, f"r{number}").num_before for number in (2, 3)] == [0, 1]


class TestRules:
    def test_the_only_device(self) -> None:
        told = driver()
        told.arrive("a", "r")
        assert why(told, "r").rule is Rule.ONLY_DEVICE

    def test_where_it_is_served(self) -> None:
        told = driver(num_devices=2)
        told.arrive("a", "first")
        told.arrive("a", "second")
        assert (why(told, "second").device, why(told, "second").rule) == (0, Rule.SERVED_THERE)

    def test_where_its_weights_are(self) -> None:
        told = driver(num_devices=2)
        told.tell(e.MemoryChanged(0, (("a", GB),)))
        told.tell(e.MemoryChanged(1, (("a", 0),)))
        told.arrive("a", "r")
        assert (why(told, "r").device, why(told, "r").rule) == (1, Rule.RESIDENT)

    def test_where_it_was_last(self) -> None:
        told = driver(num_devices=2)
        told.tell(e.MemoryChanged(1, (("a", 0),)))
        told.arrive("a", "first")
        told.tell(e.Ended("first"))
        told.arrive("a", "r")
        assert why(told, "r").rule is Rule.HOME

    def test_where_there_is_less_to_do(self) -> None:
        told = driver(num_devices=2)
        for number in range(3):
            told.arrive("a", f"a{number}")
        told.arrive("b", "r")
        assert (why(told, "r").device, why(told, "r").rule) == (1, Rule.LEAST_LOADED)

    def test_a_device_that_prefills(self) -> None:
        told = driver(num_devices=2)
        told.tell(e.RoleSet(0, Role.PREFILL, True), e.RoleSet(1, Role.DECODE, True))
        told.arrive("a", "r")
        assert (why(told, "r").device, why(told, "r").rule) == (0, Rule.PREFILLS)


class TestLine:
    def test_an_idle_device(self) -> None:
        assert turns(driver()) == Turns(0, None, None, 0.0, None, ())

    def test_nobody_waits(self) -> None:
        told = driver()
        told.arrive("a")
        told.now_s += 0.5
        assert turns(told) == Turns(0, "a", Rule.AHEAD, 0.5, None, ())

    def test_the_line_is_in_the_order_in_which_turns_come(self) -> None:
        told = driver("a b c d")
        for name in "abcd":
            told.arrive(name)
            told.now_s += 0.01
        expected = [one.model for one in turns(told).line]
        assert sorted(expected) == ["b", "c", "d"]
        assert turns(told).line[0].model == told.state.devices[0].then
        assert turns(told).line[0].starts_in_s == turns(told).left_s
        told.step(0, "r1", num_tokens=200)
        told.end_turn()
        assert told.running() == expected[0]

    def test_whoever_is_hopeless_goes_after_those_who_can_be_in_time(self) -> None:
        told = driver()
        told.arrive("c", "running")
        told.step(0, "running", num_tokens=100)
        told.arrive("a", "late")
        told.arrive("b", "young", at_s=8.0)
        told.now_s = 12.0
        first, last = turns(told).line
        assert (first.model, last.model, last.rule) == ("b", "a", Rule.EXPIRED)

    def test_looking_changes_nothing(self) -> None:
        told, untouched = driver("a b c"), driver("a b c")
        for one in (told, untouched):
            for name in "abcab":
                one.arrive(name)
                one.now_s += 0.1
                if one is told:
                    turns(told)
            one.end_turn()
        assert told.turns(6, each_s=0.5) == untouched.turns(6, each_s=0.5)

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_every_policy_names_those_who_wait_and_the_next_first(self, policy: str) -> None:
        told = Driver(make_policy(policy), "a b c", num_devices=2)
        for name in "abcabc":
            told.arrive(name)
        for request in told.state.requests.values():
            standing_of(told.state, request)
        for number, device in told.state.devices.items():
            now = turns(told, number)
            waiting = {*device.working, *device.queued} - {now.model}
            assert {one.model for one in now.line} <= waiting
            if device.then is not None:
                assert now.line[0].model == device.then
            if device.turn is not None:
                assert now.rule is not None
