"""A core's state as lines: it comes back whole, and no line does more than hold data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpupoold.replay.core_state import BadLine, Line, core_of, lines_of
from gpupoold.replay.log_file import RecordedCore, replay_on
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.invariants import check_state
from gpupoold.scheduling.policies.named import POLICY_NAMES, make_policy
from gpupoold.scheduling.state import PlannedHome
from tests.unit.scheduling.driver import Driver


def serve(core: RecordedCore, start: int, end: int) -> None:
    """Requests that come and have tokens on devices with turns; most end."""
    for number in range(start, end):
        now_s = number / 3
        core.handle([e.Tick(), e.Arrived(f"r{number}", "abc"[number % 3], now_s, 50)], now_s)
        for device in list(core.state.devices.values()):
            if device.turn is not None:
                ids = tuple(device.batches[device.turn.model].requests)
                stepped = e.Stepped(device.number, device.turn.model, ids, 3, 0.02)
                core.handle([stepped, e.TurnEnded(device.number, device.turn.turn_id)], now_s)
        if number % 4 and number >= 5:
            core.handle([e.Ended(f"r{number - 5}")], now_s)


def decoded(core: Core) -> list[Line]:
    return [msgspec.json.decode(msgspec.json.encode(one), type=Line) for one in lines_of(core)]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_core_from_its_lines_takes_the_same_actions(policy: str) -> None:
    plain = Driver(make_policy(policy), num_devices=3).core
    core = RecordedCore(plain, max_entries=100_000)
    serve(core, 0, 60)
    assert core.state.requests
    twin = core_of(decoded(plain))
    assert decoded(twin) == decoded(plain)
    check_state(twin.state)
    before = len(core.entries())
    serve(core, 60, 90)
    later = core.entries()[before:]
    assert sum(len(one.actions) for one in later) > 0
    assert replay_on(twin, later) is None


def test_shared_objects_stay_shared() -> None:
    plain = Driver(make_policy("gpupool")).core
    serve(RecordedCore(plain), 0, 5)
    state = core_of(decoded(plain)).state
    assert state.requests
    assert all(one.model is state.models[one.model.name] for one in state.requests.values())


def test_planned_homes_survive() -> None:
    plain = Driver(make_policy("gpupool"), num_devices=3).core
    plain.handle([e.Unhosted(2, "a"), e.Hostable("a", (2,))], 1.0)
    plain.state.models["a"].home = PlannedHome(2, frozenset({0, 1}))
    found = core_of(decoded(plain)).state.models["a"]
    assert (found.home, found.hostable) == (PlannedHome(2, frozenset({0, 1})), frozenset({2}))


def nested(depth: int) -> list[Any]:
    value: list[Any] = ["tuple"]
    for _ in range(depth):
        value = ["tuple", value]
    return value


CORE: Line = ("Core", {})


@pytest.mark.parametrize(
    ("lines", "number", "problem"),
    [
        ([], 0, "not a core"),
        ([("dict", [])], 0, "not a core"),
        ([("Popen", {})], 0, "no kind of object is named 'Popen'"),
        ([("RequestPhase", {})], 0, "no kind of object"),
        ([("PlannedTurn", [])], 0, "no kind of object"),
        ([("Core", {"handle": 1})], 0, "handle is not an attribute of a Core"),
        ([("Core", {"__class__": ["ref", 1]}), ("State", {})], 0, "__class__ is not an attribute"),
        ([CORE, ("Speed", {"step_ratio": 1.0})], 1, "not the attributes of Speed"),
        ([CORE, ("Speed", [])], 1, "a Speed has attributes"),
        ([CORE, ("list", {"a": 1})], 1, "not the attributes of list"),
        ([CORE, ("list", [["ref", 2]])], 1, r"\['ref', 2\] is not a value"),
        ([CORE, ("list", [["ref", -1]])], 1, "is not a value"),
        ([CORE, ("list", [["function", "system"]])], 1, "system"),
        ([CORE, ("list", [["enum", "Role", "DICTATOR"]])], 1, "DICTATOR"),
        ([CORE, ("list", [["enum", "Core", "handle"]])], 1, "is not a value"),
        ([CORE, ("list", [["PlannedTurn", "a"]])], 1, "missing"),
        (
            [CORE, ("list", [["PlannedTurn", "a", 0.0, 1.0, 1.0, "3"]])],
            1,
            "tokens_in_time of a PlannedTurn",
        ),
        ([CORE, ("list", [["float", "1e9"]])], 1, "is not a value"),
        ([CORE, ("list", [{"a": 1}])], 1, "is not a value"),
        ([CORE, ("list", nested(5000))], 1, "recursion"),
        ([CORE, ("dict", [1])], 1, "cannot unpack"),
        ([CORE, ("dict", [[["ref", 1], 1]])], 1, "unhashable"),
        ([CORE, ("array", [1 << 70])], 1, "too"),
        ([CORE, ("Targets", {"ttft_s": "soon", "tbt_s": 1.0})], 1, "ttft_s of a Targets is not"),
    ],
)
def test_lines_that_are_no_state_are_named(lines: list[Any], number: int, problem: str) -> None:
    with pytest.raises(BadLine, match=problem) as caught:
        core_of(lines)
    assert caught.value.number == number
