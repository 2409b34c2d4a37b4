"""The event log: bounded, and it replays to the same actions."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from gpupoold.replay.log_file import LogEntry, RecordedCore, replay_on
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core, UnknownName
from gpupoold.scheduling.events import Send, StartTurn, Turn
from gpupoold.sim.policies import POLICY_NAMES, make_policy
from tests.unit.scheduling.driver import Driver


def fresh(policy: str = "gpupool") -> Core:
    return Driver(make_policy(policy), num_devices=2).core


def recorded(policy: str = "gpupool", max_entries: int = 1000) -> RecordedCore:
    return RecordedCore(fresh(policy), max_entries)


def serve(core: Core | RecordedCore, count: int, start: int = 0) -> None:
    """A request at a time: it comes, has tokens, and most of them end."""
    for number in range(start, start + count):
        name, model = f"r{number}", "abc"[number % 3]
        core.handle([e.Arrived(name, model, float(number), 50)], float(number))
        device = core.state.requests[name].device or 0
        core.handle([e.Stepped(device, model, (name,), 3, 0.02)], number + 0.5)
        if number % 4:
            core.handle([e.Ended(name)], number + 0.75)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_is_recorded_replays(policy: str) -> None:
    core = recorded(policy)
    serve(core, 60)
    [segment] = core.segments
    assert sum(len(one.actions) for one in segment.entries) > 0
    assert replay_on(segment.core(), segment.entries) is None
    assert replay_on(segment.core(), segment.entries) is None  # and leaves the segment as it was


def test_actions_are_those_of_the_core() -> None:
    core, twin = recorded(), fresh()
    event = e.Arrived("r", "a", 0.0, 5)
    assert core.handle(iter([event]), 0.0) == twin.handle([event], 0.0)
    [entry] = core.entries()
    assert entry.events == (event,)
    assert entry.actions[0] == Send("r", 0)
    assert isinstance(entry.actions[1], StartTurn)


def test_at_least_half_and_at_most_all_are_kept() -> None:
    core = recorded(max_entries=20)
    sizes = []
    for number in range(50):
        serve(core, 1, start=4 * number)  # two entries each
        sizes.append(len(core.entries()))
        assert all(replay_on(segment.core(), segment.entries) is None for segment in core.segments)
    assert sizes[:5] == [2, 4, 6, 8, 10]
    assert set(sizes[10:]) == {12, 14, 16, 18, 20}


def test_the_requests_in_all_steps_are_bounded() -> None:
    core = RecordedCore(fresh(), 1000, max_names=20)
    ids = [f"r{number}" for number in range(4)]
    core.handle([e.Arrived(one, "a", 0.0, 50) for one in ids], 0.0)
    device = core.state.requests["r0"].device or 0
    num_names = []
    for number in range(20):
        core.handle([e.Stepped(device, "a", tuple(ids), 1, 0.02)], number + 1.0)
        stepped = [event for one in core.entries() for event in one.events]
        num_names.append(sum(len(one.request_ids) for one in stepped if isinstance(one, e.Stepped)))
        assert all(replay_on(segment.core(), segment.entries) is None for segment in core.segments)
    assert set(num_names[4:]) == {12, 16}


def test_it_is_known_whether_the_log_goes_back_to_a_new_core() -> None:
    assert not recorded().is_from_start  # models and devices were told before
    core = RecordedCore(Core(make_policy("gpupool")), max_entries=4)
    for number in range(4):
        core.handle([e.DeviceDown(number)], 0.0)
        assert core.is_from_start
    core.handle([e.DeviceDown(9)], 0.0)
    assert not core.is_from_start
    assert len(core.entries()) == 3


def test_the_first_difference_is_shown() -> None:
    core = recorded()
    serve(core, 10)
    [segment] = core.segments
    entries = list(segment.entries)
    entries[3] = dataclasses.replace(entries[3], actions=(StartTurn(0, Turn(9, "a", 1.0), None),))
    difference = replay_on(segment.core(), entries)
    assert difference is not None
    assert difference.index == 3
    assert difference.recorded is entries[3]
    assert difference.replayed == segment.entries[3]
    assert "entry 3 at 1.5 s: recorded [StartTurn(" in str(difference)


def test_an_error_is_recorded_and_replays() -> None:
    core = recorded()
    with pytest.raises(UnknownName):
        core.handle([e.Arrived("r", "z", 0.0, 1)], 0.0)
    serve(core, 5)
    error = core.entries()[0].error
    assert error is not None
    assert error.startswith("UnknownName: ")
    assert replay_on(core.segments[0].core(), core.segments[0].entries) is None
    first = dataclasses.replace(core.entries()[0], error=None)
    difference = replay_on(core.segments[0].core(), [first])
    assert "recorded [], replayed UnknownName" in str(difference)


def test_recording_does_not_change_the_core() -> None:
    core, plain = recorded(max_entries=2), fresh()
    for number in range(30):
        event = e.Arrived(f"r{number}", "abc"[number % 3], float(number), 50)
        assert core.handle([event], float(number)) == plain.handle([event], float(number))


def test_a_log_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        recorded(max_entries=1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_core_is_plain_data(policy: str) -> None:
    """A deep copy goes its own way, and the same way when told the same."""
    core = fresh(policy)
    serve(core, 20)
    twin = pickle.loads(pickle.dumps(core))
    for number in range(20, 40):
        told: tuple[e.Event, ...] = (e.Arrived(f"r{number}", "abc"[number % 3], 0.0, 50),)
        actions = tuple(core.handle(told, float(number)))
        again = tuple(twin.handle(told, float(number)))
        assert LogEntry(0.0, told, actions) == LogEntry(0.0, told, again)
