"""The core's books, event by event, under a policy that is as simple as can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import UnknownName
from gpupoold.scheduling.events import ChangeRole, Turn
from gpupoold.scheduling.policies.base import Placement
from gpupoold.scheduling.policies.named import make_policy
from gpupoold.scheduling.state import DeviceState, IllegalTransition, Request, RequestPhase, State
from tests.unit.scheduling.driver import (
    COSTS,
    GB,
    STEP_S,
    Driver,
    FirstDevicePolicy,
    migrations_in,
    runs,
    sends,
)


class TestRequests:
    def test_a_request_is_sent_and_its_model_runs(self) -> None:
        driver = Driver()
        actions = driver.arrive("a", "r")
        assert sends(actions) == [("r", 0)]
        assert runs(actions) == [(0, "a", None)]
        assert driver.place("r") == ("SENT", 0)

    def test_the_second_of_a_model_changes_nothing_about_the_turn(self) -> None:
        driver = Driver()
        driver.arrive("a", "r1")
        actions = driver.arrive("a", "r2")
        assert (sends(actions), runs(actions)) == ([("r2", 0)], [])

    def test_another_model_comes_after(self) -> None:
        driver = Driver()
        driver.arrive("a")
        turn = driver.state.devices[0].turn
        assert runs(driver.arrive("b")) == [(0, "a", "b")]
        assert driver.state.devices[0].turn is turn

    def test_cached_tokens_of_prompts_are_learnt(self) -> None:
        driver = Driver()
        for number in range(60):
            driver.arrive("a", f"r{number}", prompt_tokens=1000)
            driver.send(e.PromptCached(f"r{number}", 900))
            driver.step(0, f"r{number}")
            # Not counted: the request has a token, so its prompt was computed elsewhere before.
            driver.send(e.PromptCached(f"r{number}", 0))
            driver.send(e.Ended(f"r{number}"))
        driver.send(e.PromptCached("gone", 0))
        driver.arrive("a", "next", prompt_tokens=1000)
        request = driver.state.requests["next"]
        assert 750 < request.cached_tokens < 900
        batch = driver.state.devices[0].batches["a"]
        assert batch.waiting_tokens == request.prefill_tokens == 1000 - request.cached_tokens
        assert batch.kv_need_bytes == request.kv_need_bytes
        driver.send(e.ModelRemoved("a"))
        assert driver.state.cached.predict("a", 1000) == 0

    def test_counts_follow_tokens(self) -> None:
        driver = Driver()
        driver.arrive("a", "r1", prompt_tokens=10)
        driver.arrive("a", "r2", prompt_tokens=20)
        batch = driver.state.devices[0].batches["a"]
        assert (batch.num_waiting, batch.context_tokens) == (2, 0)
        driver.step(0, "r1")
        assert (batch.num_waiting, batch.context_tokens) == (1, 11)
        assert driver.place("r1") == ("DECODING", 0)
        driver.step(0, "r1", num_tokens=5)
        driver.step(0, "r2")
        assert (batch.num_waiting, batch.context_tokens) == (0, 16 + 21)
        driver.send(e.Ended("r1"))
        assert (batch.num_waiting, batch.context_tokens) == (0, 21)

    def test_the_last_request_leaves_the_turn_to_its_device(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        assert driver.send(e.Ended("r")) == []
        assert driver.running() == "a"
        assert runs(driver.end_turn()) == []
        assert driver.running() is None

    def test_a_request_before_the_reported_end_of_the_turn_gets_a_new_turn(self) -> None:
        driver = Driver()
        driver.arrive("a", "r1")
        driver.send(e.Ended("r1"))
        # The device has said that the turn is over, but the core hears it later.
        assert runs(driver.arrive("a", "r2")) == []
        assert runs(driver.end_turn()) == [(0, "a", None)]

    def test_nobody_comes_after_once_those_who_waited_are_gone(self) -> None:
        driver = Driver()
        driver.arrive("a")
        driver.arrive("b", "r")
        assert runs(driver.send(e.Ended("r"))) == [(0, "a", None)]

    def test_an_id_that_is_live_cannot_arrive_again(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        with pytest.raises(ValueError, match="r arrived, but is live"):
            driver.arrive("b", "r")
        driver.send(e.Ended("r"))
        assert sends(driver.arrive("b", "r")) == [("r", 0)]

    def test_a_token_for_a_request_that_ended_in_the_same_breath(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.send(e.Stepped(0, "a", ("r", "gone")), e.Ended("r"), e.Ended("r"))
        assert driver.state.requests == {}


class TestTurns:
    def test_turns_are_numbered_over_all_devices(self) -> None:
        driver = Driver(models="a", num_devices=2)
        driver.send(e.Unhosted(1, "a"))
        driver.send(e.ModelAdded("z", Targets(), GB, 1, COSTS), e.Hosted(1, "z"))
        driver.arrive("a")
        driver.arrive("z")
        turns = [device.turn for device in driver.state.devices.values()]
        assert turns == [Turn(1, "a", 1.0), Turn(2, "z", 1.0)]

    def test_only_the_end_of_the_present_turn_counts(self) -> None:
        driver = Driver()
        driver.arrive("a")
        for old in (e.TurnEnded(0, 0), e.TurnEnded(0, 2), e.TurnEnded(5, 1)):
            assert driver.send(old) == []
        assert runs(driver.end_turn()) == [(0, "a", None)]
        assert driver.send(e.TurnEnded(0, 1)) == []

    def test_the_policy_may_change_the_quota_of_a_turn(self) -> None:
        class Impatient(FirstDevicePolicy):
            def revise(self, turn: Turn, device: DeviceState, state: State, now_s: float) -> Turn:
                return replace(turn, quota_s=0.5) if len(state.requests) > 1 else turn

        driver = Driver(Impatient())
        driver.arrive("a")
        assert driver.quota_s() == 1.0
        driver.arrive("b")
        assert driver.state.devices[0].turn == Turn(1, "a", 0.5)


class TestDevices:
    def test_without_a_host_a_request_is_held(self) -> None:
        driver = Driver(num_devices=0)
        assert driver.arrive("a", "r") == []
        assert driver.place("r") == ("HELD", None)
        driver.send(e.DeviceUp(3, GB, GB))
        assert driver.place("r") == ("HELD", None)
        actions = driver.send(e.Hosted(3, "a"))
        assert (sends(actions), runs(actions)) == ([("r", 3)], [(3, "a", None)])

    def test_requests_of_a_device_that_goes_down_start_anew_elsewhere(self) -> None:
        driver = Driver(num_devices=2)
        driver.arrive("a", "r", prompt_tokens=10)
        driver.step(0, "r", num_tokens=3)
        actions = driver.send(e.DeviceDown(0))
        assert sends(actions) == [("r", 1)]
        request = driver.state.requests["r"]
        assert (request.num_tokens, request.phase) == (3, RequestPhase.SENT)
        driver.step(1, "r")
        assert driver.state.devices[1].batches["a"].context_tokens == 14

    def test_a_device_that_comes_up_twice_has_lost_its_requests(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        assert driver.send(e.DeviceUp(0, GB, GB)) == []
        assert driver.place("r") == ("HELD", None)
        assert sends(driver.send(e.Hosted(0, "a"))) == [("r", 0)]

    def test_what_a_device_says_after_it_went_down_is_ignored(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.send(e.DeviceDown(0))
        late = (
            e.Stepped(0, "a", ("r",)),
            e.TurnEnded(0, 1),
            e.MemoryChanged(0, (("a", 1),)),
            e.Unhosted(0, "a"),
            e.DeviceDown(0),
            e.Attached("r"),
        )
        assert driver.send(*late) == []
        assert driver.place("r") == ("HELD", None)

    def test_unhosting_takes_the_turn_and_the_requests(self) -> None:
        driver = Driver(num_devices=2)
        driver.arrive("a", "r1")
        driver.arrive("b", "r2")
        actions = driver.send(e.Unhosted(0, "a"))
        assert sends(actions) == [("r1", 1)]
        assert sorted(runs(actions)) == [(0, "b", None), (1, "a", None)]
        assert driver.send(e.Unhosted(0, "a")) == []

    def test_missing_bytes_until_reported_are_all_the_weights(self) -> None:
        driver = Driver(weight_bytes=10 * GB, bandwidth_bytes_per_s=5 * GB)
        device, model = driver.state.devices[0], driver.state.models["a"]
        assert device.switch_s(model) == 2.0
        driver.send(e.MemoryChanged(0, (("a", 5 * GB), ("stranger", 7))))
        assert device.switch_s(model) == 1.0
        driver.send(e.ModelRemoved("a"))
        assert device.missing_bytes == {}


class TestModels:
    def test_a_removed_model_takes_its_requests_along(self) -> None:
        driver = Driver()
        driver.arrive("a", "r1")
        driver.arrive("b", "r2")
        assert runs(driver.send(e.ModelRemoved("a"))) == [(0, "b", None)]
        assert set(driver.state.requests) == {"r2"}
        assert driver.send(e.ModelRemoved("a"), e.Unhosted(0, "a")) == []

    def test_new_targets_count_for_requests_under_way(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.send(e.TargetsChanged("a", Targets(2.0, 0.5)))
        assert driver.state.requests["r"].next_deadline_s == 2.0
        driver.step(0, "r", num_tokens=4)
        assert driver.state.requests["r"].next_deadline_s == 4.0

    def test_a_model_described_anew_keeps_its_hosts_and_its_pace(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.step(0, "r", step_s=1.0)
        model = driver.state.models["a"]
        step_ratio = model.speed().step_ratio
        assert step_ratio > 1
        driver.send(e.ModelAdded("a", Targets(1.0, 1.0), 3, 4, COSTS))
        assert driver.state.models["a"] is model
        assert (model.hosts, model.speed().step_ratio, model.weight_bytes) == ({0}, step_ratio, 3)

    def test_steps_that_take_longer_than_predicted_are_learnt(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        batch = driver.state.devices[0].batches["a"]
        assert batch.step_s() == STEP_S
        for _ in range(100):
            driver.step(0, "r", step_s=2 * STEP_S)
        assert batch.step_s() == pytest.approx(2 * STEP_S, rel=1e-3)
        for _ in range(10_000):
            driver.core.handle([e.Stepped(0, "a", ("r",), 1, 0.0)], 0.0)
        assert batch.step_s() > 0

    def test_names_that_were_never_added_are_refused(self) -> None:
        driver = Driver()
        for event in (
            e.Arrived("r", "z", 0.0, 1),
            e.TargetsChanged("z", Targets()),
            e.Hosted(0, "z"),
        ):
            with pytest.raises(UnknownName, match="model 'z'"):
                driver.send(event)
        with pytest.raises(UnknownName, match="device 7"):
            driver.send(e.Hosted(7, "a"))


class Prefills(FirstDevicePolicy):
    """Prompts on device 0, answers on device 1."""

    def first_token(self, request: Request, state: State, now_s: float) -> DeviceState | None:
        return state.devices.get(1)


class TestMigrate:
    def test_a_request_moves_with_its_first_token(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.arrive("a", "r", prompt_tokens=10)
        actions = driver.step(0, "r")
        assert migrations_in(actions) == [("r", 0, 1)]
        assert driver.place("r") == ("MOVING", 1)
        assert driver.state.devices[0].batches["a"].context_tokens == 0
        assert driver.state.devices[1].turn is None
        assert runs(driver.send(e.Attached("r"))) == [(1, "a", None)]
        assert driver.place("r") == ("DECODING", 1)
        assert driver.state.devices[1].batches["a"].context_tokens == 11
        assert driver.send(e.Attached("r")) == []

    def test_it_stays_where_it_is_if_that_is_where_it_should_go(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.send(e.Unhosted(0, "a"))
        driver.arrive("a", "r")
        assert migrations_in(driver.step(1, "r")) == []
        assert driver.place("r") == ("DECODING", 1)

    def test_one_that_has_ended_meanwhile_does_not_move(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.arrive("a", "r")
        assert driver.send(e.Stepped(0, "a", ("r",)), e.Ended("r")) == []

    def test_one_that_lost_its_device_meanwhile_does_not_move(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.arrive("a", "r")
        actions = driver.send(e.Stepped(0, "a", ("r",)), e.DeviceDown(0))
        assert (migrations_in(actions), sends(actions)) == ([], [("r", 1)])

    def test_one_whose_new_device_goes_down_on_the_way_starts_anew(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.arrive("a", "r")
        driver.step(0, "r")
        assert sends(driver.send(e.DeviceDown(1))) == [("r", 0)]
        assert driver.send(e.Attached("r")) == []

    def test_one_that_ends_on_the_way_is_gone(self) -> None:
        driver = Driver(Prefills(), num_devices=2)
        driver.arrive("a", "r")
        driver.step(0, "r")
        driver.send(e.Ended("r"))
        assert driver.state.devices[1].moving == {}
        assert driver.send(e.Attached("r")) == []


class TestRoles:
    def test_a_device_that_prefills_gives_answers_away(self) -> None:
        driver = Driver(num_devices=2)
        driver.arrive("a", "r")
        driver.step(0, "r")
        assert migrations_in(driver.send(e.RoleSet(0, Role.PREFILL))) == [("r", 0, 1)]
        driver.send(e.Attached("r", 7))
        assert driver.place("r") == ("DECODING", 1)
        assert driver.state.requests["r"].num_tokens == 7
        assert driver.state.devices[1].batches["a"].context_tokens == 107

    def test_answers_stay_where_all_devices_prefill(self) -> None:
        driver = Driver(num_devices=2)
        for number in range(2):
            driver.send(e.RoleSet(number, Role.PREFILL))
        driver.arrive("a", "r")
        assert migrations_in(driver.step(0, "r")) == []

    def test_hosts_go_by_roles_where_any_has_them(self) -> None:
        driver = Driver(num_devices=3)
        driver.send(e.RoleSet(0, Role.PREFILL), e.RoleSet(1, Role.DECODE))
        state, model = driver.state, driver.state.models["a"]
        assert [one.number for one in state.prefill_hosts(model)] == [0, 2]
        assert [one.number for one in state.decode_hosts(model)] == [1, 2]
        driver.send(e.DrainSet(0, True), e.DrainSet(2, True))
        assert [one.number for one in state.prefill_hosts(model)] == [1]
        driver.send(e.DrainSet(1, True))
        assert [one.number for one in state.decode_hosts(model)] == [1, 2]

    def test_the_policy_changes_roles_that_are_not_fixed(self) -> None:
        class AllDecode(FirstDevicePolicy):
            def roles(self, state: State, now_s: float) -> list[tuple[DeviceState, Role]]:
                return [(one, Role.DECODE) for one in state.devices.values()]

        driver = Driver(AllDecode(), num_devices=2)
        driver.send(e.RoleSet(0, Role.MIXED))
        assert driver.send(e.Tick()) == [ChangeRole(1, Role.DECODE)]
        assert driver.send(e.Tick()) == []
        assert driver.state.devices[0].role is Role.MIXED

    def test_the_policy_moves_answers_at_a_tick(self) -> None:
        class Evens(FirstDevicePolicy):
            def rebalance(self, state: State, now_s: float) -> list[tuple[Request, DeviceState]]:
                return [(one, state.devices[1]) for one in state.requests.values()]

        driver = Driver(Evens(), num_devices=2)
        driver.arrive("a", "r")
        driver.arrive("a", "waits")
        driver.step(0, "r")
        assert migrations_in(driver.send(e.Tick())) == [("r", 0, 1)]
        assert migrations_in(driver.send(e.Tick())) == []


class TestDrain:
    def test_all_that_a_device_has_goes_elsewhere(self) -> None:
        class Keeps(FirstDevicePolicy):
            def assign(self, state: State, now_s: float) -> list[Placement]:
                held = list(state.held.values())
                return [Placement(one, state.prefill_hosts(one.model)[0]) for one in held]

            def send(self, device: DeviceState, state: State, now_s: float) -> list[Request]:
                return [one for one in device.queued_requests() if "queued" not in one.id]

        driver = Driver(Keeps(), num_devices=2)
        for name in ("answered", "sent", "queued"):
            driver.arrive("a", name)
        driver.step(0, "answered")
        assert migrations_in(driver.send(e.DrainSet(0, True))) == [("answered", 0, 1)]
        assert driver.place("queued") == ("QUEUED", 1)
        assert driver.place("sent") == ("SENT", 0)
        assert migrations_in(driver.step(0, "sent")) == [("sent", 0, 1)]
        assert driver.state.devices[0].num_requests == 0
        assert sends(driver.arrive("a", "new")) == [("new", 1)]
        driver.send(e.DrainSet(0, False))
        assert sends(driver.arrive("a", "later")) == [("later", 0)]

    def test_what_can_go_nowhere_is_served_where_it_is(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.send(e.DrainSet(0, True))
        assert migrations_in(driver.step(0, "r")) == []
        assert driver.place("r") == ("DECODING", 0)

    def test_who_had_no_room_elsewhere_goes_when_there_is_some(self) -> None:
        driver = Driver(
            num_devices=2, capacity_bytes=12 * GB, kv_bytes_per_token=10**6, kv_host_bytes=0
        )
        driver.send(e.RoleSet(0, Role.PREFILL))
        driver.arrive("a", "large", prompt_tokens=1500)
        assert migrations_in(driver.step(0, "large")) == [("large", 0, 1)]
        driver.send(e.Attached("large"))
        driver.arrive("a", "small", prompt_tokens=10)
        assert migrations_in(driver.step(0, "small")) == []
        assert migrations_in(driver.send(e.Ended("large"))) == [("small", 0, 1)]


def test_a_request_goes_to_an_emptied_device_when_no_other_has_its_model_any_more() -> None:
    driver = Driver(make_policy("request-level"), "a b", num_devices=2)
    driver.send(e.DrainSet(0, True))
    driver.arrive("a", "running")
    driver.arrive("b", "held")
    assert driver.state.requests["held"].device is None
    driver.send(e.Unhosted(1, "b"))
    assert driver.state.requests["held"].device == 0


def test_a_policy_cannot_corrupt_the_books() -> None:
    class Mischief(FirstDevicePolicy):
        def assign(self, state: State, now_s: float) -> list[Placement]:
            here = [one for one in state.requests.values() if one.device == 0]
            return [Placement(one, state.devices[0]) for one in here]

        def send(self, device: DeviceState, state: State, now_s: float) -> list[Request]:
            return device.queued_requests()

    driver = Driver()
    driver.arrive("a", "r")
    driver.core.policy = Mischief()
    with pytest.raises((IllegalTransition, KeyError)):
        driver.arrive("b")
