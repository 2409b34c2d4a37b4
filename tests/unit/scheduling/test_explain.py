"""Where requests stand, who decided that, and who is before them."""

from __future__ import annotations

import pytest

from gpupoold.domain import Role, Turns
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.wait_estimate import (
    RequestExplanation,
    Standing,
    standing_of,
    turns_of,
    why_request,
)
from gpupoold.sim.policies import POLICY_NAMES, make_policy
from tests.unit.scheduling.driver import GB, STEP_S, Driver

PREFILL_S = 0.1
SWITCH_S = 1.0


def driver(models: str = "a b c", **more: object) -> Driver:
    rig = Driver(GpupoolPolicy(), models, **more)  # type: ignore[arg-type]
    rig.send(e.MemoryChanged(0, tuple((name, 0) for name in models.split())))
    return rig


def why(rig: Driver, name: str) -> RequestExplanation:
    return why_request(rig.state, rig.state.requests[name], rig.now_s)


def turns(rig: Driver, number: int = 0) -> Turns:
    return turns_of(rig.core.policy, rig.state, rig.state.devices[number], rig.now_s)


class TestStanding:
    def test_without_a_device(self) -> None:
        rig = driver()
        rig.send(e.DeviceDown(0))
        rig.arrive("a", "r")
        assert why(rig, "r") == RequestExplanation(Standing.NO_DEVICE, None, None, None)

    def test_held_by_a_policy_that_waits_for_a_free_device(self) -> None:
        rig = Driver(make_policy("request-level"), "a b")
        rig.arrive("a", "first")
        rig.arrive("b", "second")
        assert why(rig, "first").rule is Rule.FREE_DEVICE
        assert why(rig, "second").standing is Standing.HELD
        assert why(rig, "second").next_token_in_s is not None

    def test_from_prompt_to_pause(self) -> None:
        rig = driver()
        rig.arrive("a", "r")
        assert why(rig, "r").standing is Standing.PREFILLING
        rig.step(0, "r")
        assert why(rig, "r").standing is Standing.ON_TURN
        rig.arrive("b", "other")
        assert why(rig, "other").standing is Standing.WAITS_FOR_TURN
        rig.end_turn()
        assert rig.running() == "b"
        assert why(rig, "r").standing is Standing.PAUSED

    def test_on_its_way(self) -> None:
        rig = driver(num_devices=2)
        rig.arrive("a", "r")
        rig.step(0, "r")
        rig.send(e.DrainSet(0, True))
        assert why(rig, "r") == RequestExplanation(
            Standing.MOVING, 1, Rule.ANSWERS_ELSEWHERE, why(rig, "r").next_token_in_s
        )
        # Its KV goes out and in, its model has to be brought in there, and it makes a step.
        kv_s = 2 * 101 * 100_000 / (10 * GB)
        expected_s = kv_s + SWITCH_S + STEP_S
        assert why(rig, "r").next_token_in_s == pytest.approx(expected_s, rel=0.1)

    def test_for_room_for_kv(self) -> None:
        rig = driver("a", capacity_bytes=12 * GB, kv_bytes_per_token=1_000_000, kv_host_bytes=0)
        for number in range(4):
            rig.arrive("a", f"r{number}", at_s=float(number), prompt_tokens=700)
        assert [why(rig, f"r{number}").standing for number in range(4)] == [
            Standing.PREFILLING,
            Standing.PREFILLING,
            Standing.KV_ROOM,
            Standing.KV_ROOM,
        ]
        assert [why(rig, f"r{number}").num_before for number in (2, 3)] == [0, 1]


class TestRules:
    def test_the_only_device(self) -> None:
        rig = driver()
        rig.arrive("a", "r")
        assert why(rig, "r").rule is Rule.ONLY_DEVICE

    def test_where_it_is_served(self) -> None:
        rig = driver(num_devices=2)
        rig.arrive("a", "first")
        rig.arrive("a", "second")
        assert (why(rig, "second").device, why(rig, "second").rule) == (0, Rule.SERVED_THERE)

    def test_where_its_weights_are(self) -> None:
        rig = driver(num_devices=2)
        rig.send(e.MemoryChanged(0, (("a", GB),)))
        rig.send(e.MemoryChanged(1, (("a", 0),)))
        rig.arrive("a", "r")
        assert (why(rig, "r").device, why(rig, "r").rule) == (1, Rule.RESIDENT)

    def test_where_its_snapshot_is_near(self) -> None:
        rig = driver(num_devices=2)
        for number in range(2):
            rig.send(e.MemoryChanged(number, (("a", GB),)))
        rig.send(e.FarSnapshots(0, ("a",)))
        rig.arrive("a", "r")
        assert (why(rig, "r").device, why(rig, "r").rule) == (1, Rule.NEAR_WEIGHTS)

    def test_where_it_was_last(self) -> None:
        rig = driver(num_devices=2)
        rig.send(e.MemoryChanged(1, (("a", 0),)))
        rig.arrive("a", "first")
        rig.send(e.Ended("first"))
        rig.arrive("a", "r")
        assert why(rig, "r").rule is Rule.HOME

    def test_where_there_is_less_to_do(self) -> None:
        rig = driver(num_devices=2)
        for number in range(3):
            rig.arrive("a", f"a{number}")
        rig.arrive("b", "r")
        assert (why(rig, "r").device, why(rig, "r").rule) == (1, Rule.LEAST_LOADED)

    def test_a_device_that_prefills(self) -> None:
        rig = driver(num_devices=2)
        rig.send(e.RoleSet(0, Role.PREFILL, True), e.RoleSet(1, Role.DECODE, True))
        rig.arrive("a", "r")
        assert (why(rig, "r").device, why(rig, "r").rule) == (0, Rule.PREFILLS)


class TestLine:
    def test_an_idle_device(self) -> None:
        assert turns(driver()) == Turns(0, None, None, None, 0.0, None, [])

    def test_nobody_waits(self) -> None:
        rig = driver()
        rig.arrive("a")
        rig.now_s += 0.5
        assert turns(rig) == Turns(0, "a", Rule.AHEAD, Rule.AHEAD.why, 0.5, None, [])

    def test_the_line_is_in_the_order_in_which_turns_come(self) -> None:
        rig = driver("a b c d")
        for name in "abcd":
            rig.arrive(name)
            rig.now_s += 0.01
        expected = [one.model for one in turns(rig).line]
        assert sorted(expected) == ["b", "c", "d"]
        assert turns(rig).line[0].model == rig.state.devices[0].then
        assert turns(rig).line[0].starts_in_s == turns(rig).left_s
        rig.step(0, "r1", num_tokens=200)
        rig.end_turn()
        assert rig.running() == expected[0]

    def test_an_expired_request_goes_after_those_who_can_be_in_time(self) -> None:
        rig = driver()
        rig.arrive("c", "running")
        rig.step(0, "running", num_tokens=100)
        rig.arrive("a", "late")
        rig.arrive("b", "young", at_s=8.0)
        rig.now_s = 12.0
        first, last = turns(rig).line
        assert (first.model, last.model, last.rule) == ("b", "a", Rule.EXPIRED)

    def test_looking_changes_nothing(self) -> None:
        rig, untouched = driver("a b c"), driver("a b c")
        for one in (rig, untouched):
            for name in "abcab":
                one.arrive(name)
                one.now_s += 0.1
                if one is rig:
                    turns(rig)
            one.end_turn()
        assert rig.turns(6, each_s=0.5) == untouched.turns(6, each_s=0.5)

    @pytest.mark.parametrize("policy", POLICY_NAMES)
    def test_every_policy_names_those_who_wait_and_the_next_first(self, policy: str) -> None:
        rig = Driver(make_policy(policy), "a b c", num_devices=2)
        for name in "abcabc":
            rig.arrive(name)
        for request in rig.state.requests.values():
            standing_of(rig.state, request)
        for number, device in rig.state.devices.items():
            now = turns(rig, number)
            waiting = {*device.working, *device.queued} - {now.on_turn}
            assert {one.model for one in now.line} <= waiting
            if device.then is not None:
                assert now.line[0].model == device.then
            if device.turn is not None:
                assert now.rule is not None
