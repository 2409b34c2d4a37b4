"""Whether a model can serve, where, and if not why."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gpupool_state import ModelRow
from gpupoold.control.fleet.fleet import Availability, Fleet
from gpupoold.control.fleet.states import HostEvent, ModelPhase
from gpupoold.control.processes.supervised import Death
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.domain import ModelState, Preset, Targets
from gpupoold.errors import Failed, Refused
from tests.unit.control.fleet_box import LAYOUT, FleetBox, spec_of
from tests.unit.control.loaded import loaded

NAME = "llama"
DEATH = Death("signal 11", True)


@pytest.fixture
def box() -> FleetBox:
    return FleetBox([NAME])


def serving(box: FleetBox, *numbers: int) -> Fleet:
    """The fleet when these devices have the model, and it is mounted."""
    box.warm.add(NAME)
    for number in numbers:
        box.fleet.host(loaded(NAME), number)
        box.come_up(number)
    return box.fleet


def crash_twice(fleet: Fleet) -> str:
    fleet.breakers.record_crash(NAME, 0, DEATH, 0.0)
    return fleet.breakers.record_crash(NAME, 0, DEATH, 1.0) or ""


def test_a_model_is_ready_with_a_device_and_a_mounted_api(box: FleetBox) -> None:
    fleet = box.fleet
    assert fleet.availability(NAME) == Availability(ModelPhase.LOADING)
    fleet.host(loaded(NAME), 0)
    assert not fleet.availability(NAME).can_serve
    assert fleet.availability(NAME).devices == (0,)
    fleet.opened(NAME)
    assert fleet.availability(NAME) == Availability(ModelPhase.READY, (0,))
    fleet.lose_device(0)
    assert fleet.availability(NAME) == Availability(ModelPhase.LOADING)
    assert not fleet.is_open(NAME)
    fleet.host(loaded(NAME), 1)  # its API is still mounted
    assert fleet.availability(NAME) == Availability(ModelPhase.READY, (1,))
    fleet.unmounted(NAME)
    assert fleet.availability(NAME).phase is ModelPhase.LOADING
    assert fleet.loaded(NAME) is None


def test_a_failure_lasts_until_the_model_is_open(box: FleetBox) -> None:
    fleet = box.fleet
    fleet.breakers.open(NAME, "no such file", 10.0, is_blocking=False)
    fleet.fail(NAME, "no such file")
    now = fleet.availability(NAME)
    assert (now.phase, now.state) == (ModelPhase.FAILED, ModelState.FAILED)
    assert (now.reason, now.retry_at_s) == ("no such file", 40.0)
    fleet.check_quarantine(NAME)  # a worker that comes up may load it
    fleet.host(loaded(NAME), 0)
    assert fleet.availability(NAME).state is ModelState.FAILED
    fleet.breakers.close(NAME, 41.0)
    fleet.opened(NAME)
    assert fleet.availability(NAME) == Availability(ModelPhase.READY, (0,))


def test_a_quarantined_model_may_not_be_loaded_or_opened(box: FleetBox) -> None:
    fleet = serving(box, 0)
    reason = crash_twice(fleet)
    fleet.fail(NAME, reason)
    fleet.unhost_all(NAME)
    fleet.opened(NAME)  # a mount that was under way
    now = fleet.availability(NAME)
    assert (now.phase, now.state, now.devices) == (ModelPhase.QUARANTINED, ModelState.FAILED, ())
    with pytest.raises(Failed, match="ended the worker of device 0 twice"):
        fleet.check_quarantine(NAME)
    fleet.breakers.half_open(NAME)
    fleet.check_quarantine(NAME)
    fleet.breakers.open(NAME, "no such file", 99.0, is_blocking=False)
    fleet.fail(NAME, "no such file")
    assert fleet.availability(NAME).phase is ModelPhase.FAILED


def test_after_a_drain_a_model_is_what_it_has_become(box: FleetBox) -> None:
    fleet = serving(box, 0)
    with fleet.draining(NAME):
        assert fleet.availability(NAME).state is ModelState.DRAINING
        with fleet.draining(NAME):
            pass
        assert fleet.is_draining(NAME)
    assert fleet.availability(NAME).can_serve
    with fleet.draining(NAME):
        fleet.lose_device(0)
        assert fleet.availability(NAME).state is ModelState.DRAINING
    assert fleet.availability(NAME).state is ModelState.LOADING
    with fleet.draining(NAME):
        fleet.fail(NAME, "no such file")
    assert fleet.availability(NAME).phase is ModelPhase.FAILED
    with fleet.draining(NAME):
        crash_twice(fleet)
    assert fleet.availability(NAME).phase is ModelPhase.QUARANTINED
    with fleet.draining(NAME):
        fleet.remove(NAME)
    assert fleet.availability(NAME) == Availability(ModelPhase.REMOVED)
    assert not fleet.knows(NAME)
    fleet.breakers.due(1e9)
    assert fleet.breakers.retry_at_s(NAME) is None


def test_draining_devices_take_no_new_requests(box: FleetBox) -> None:
    fleet = serving(box, 0, 1)
    assert not fleet.is_device_draining(0)
    for _ in range(2):
        fleet.drain_device(0, is_draining=True)
    assert fleet.is_device_draining(0)
    assert not fleet.is_device_draining(1)
    assert fleet.availability(NAME).can_serve
    fleet.lose_device(1)
    now = fleet.availability(NAME)
    assert (now.state, now.devices) == (ModelState.READY, (0,))
    assert not now.can_serve
    assert not now.takes_requests
    for _ in range(2):
        fleet.drain_device(0, is_draining=False)
    assert fleet.availability(NAME).can_serve
    fleet.lose_device(0)
    assert not fleet.availability(NAME).takes_requests


def test_warm_is_what_can_run_at_once(box: FleetBox) -> None:
    fleet = box.fleet
    assert fleet.is_warm(NAME)  # without a worker there is nothing to restore
    serving(box, 0, 1)
    assert fleet.is_warm(NAME)
    fleet.set_damaged(NAME, is_damaged=True)
    assert not fleet.is_warm(NAME)
    fleet.set_damaged(NAME, is_damaged=False)
    box.warm.clear()
    assert not fleet.is_warm(NAME)
    box.warm.add(NAME)
    fleet.hosts.of(NAME, 1).move(HostEvent.DETACH)
    assert not fleet.is_warm(NAME)
    fleet.hosts.lose_worker(1)
    fleet.lose_device(1)
    assert fleet.is_warm(NAME)


def test_simulated_devices_need_no_snapshot() -> None:
    fleet = Fleet(SnapshotCache(0), without_snapshots=[0])
    fleet.register(spec_of(NAME))
    fleet.host(loaded(NAME), 0)
    assert fleet.is_warm(NAME)
    fleet.host(loaded(NAME), 1)
    assert fleet.devices_with_snapshot(NAME) == [1]
    assert not fleet.is_warm(NAME)


def test_names_that_somebody_is_adding_are_taken(box: FleetBox) -> None:
    fleet = box.fleet
    proposal = fleet.propose(["new", "alias"])
    for name in ("new", "alias"):
        with pytest.raises(Refused, match=f"{name!r} is being added already"):
            fleet.propose(["another", name])
    with pytest.raises(Refused, match="still being removed"):
        fleet.propose([NAME])
    assert not fleet.knows("new")
    fleet.fail("new", "of no interest: it is not registered")
    fleet.drop_proposal(proposal)
    other = fleet.propose(["alias"])
    fleet.drop_proposal(proposal)  # of no effect now
    fleet.register(spec_of("alias"))
    fleet.drop_proposal(other)
    assert fleet.knows("alias")


def test_models_of_the_registry_are_as_they_were() -> None:
    fleet = Fleet(SnapshotCache(0))
    fleet.restore(
        ModelRow(spec_of(state.value), state, "why", "", 0, 0, None, 0.0) for state in ModelState
    )
    now = {state: fleet.availability(state.value) for state in ModelState}
    assert {state: one.state for state, one in now.items()} == {
        ModelState.REGISTERED: ModelState.REGISTERED,
        ModelState.LOADING: ModelState.LOADING,
        ModelState.READY: ModelState.LOADING,
        ModelState.DRAINING: ModelState.LOADING,
        ModelState.FAILED: ModelState.FAILED,
    }
    assert now[ModelState.FAILED].reason == "why"
    assert {one.reason for state, one in now.items() if state is not ModelState.FAILED} == {""}


def test_targets_are_those_of_the_latest_change(box: FleetBox) -> None:
    assert box.fleet.targets(NAME) == Targets()
    preset = Preset("quick", {}, ttft_s=0.5)
    changed = replace(spec_of(NAME), targets=Targets(1.0, 0.2), presets=(preset,))
    box.fleet.changed(changed)
    assert box.fleet.targets(NAME) == Targets(1.0, 0.2)
    assert box.fleet.targets(NAME, "quick") == Targets(0.5, 0.2)


async def test_a_change_of_a_user_waits_for_work_and_for_other_changes() -> None:
    fleet, seen, may_end = Fleet(SnapshotCache(0)), list[str](), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        seen.append("work")

    async def change(name: str) -> None:
        async with fleet.alone("a"):
            seen.append(name)
            await asyncio.sleep(0)
            seen.append(name)

    fleet.began("a", asyncio.create_task(work()))
    assert fleet.is_changing("a")
    assert not fleet.is_held("a")
    changes = [asyncio.create_task(change(name)) for name in ("first", "gives up", "second")]
    await asyncio.sleep(0)
    assert fleet.is_held("a")
    assert not seen
    changes[1].cancel()
    async with asyncio.timeout(1), fleet.alone("another"):
        may_end.set()
    await asyncio.gather(*changes, return_exceptions=True)
    assert seen == ["work", "first", "first", "second", "second"]
    assert not fleet.is_changing("a")
    assert await fleet.woken() == {"a", "another"}


def test_engines_to_take_over() -> None:
    """Of the family that the worker has told; by the layout of the snapshot before any load."""
    box = FleetBox(["a", "b", "c", "d", "alone"])
    hosts, slots = box.fleet.hosts, box.fleet.snapshots.slots
    families = {"a": "llama", "b": "llama", "d": "other", "alone": ""}
    for number, name in ((0, "a"), (1, "b"), (1, "d"), (2, "alone")):
        host = hosts.of(name, number)
        host.move(HostEvent.LOAD)
        host.loaded(LAYOUT, has_snapshot=True)
        hosts.loaded(name, number, family=families[name])
    engines = hosts.engines()
    assert slots("a", engines) == {1: ["b"]}
    assert slots("alone", engines) == {}
    assert slots("c", engines) == {}
    box.warm.add("c")
    assert slots("c", engines) == {0: ["a"], 1: ["b", "d"]}
    hosts.loaded("c", 3, family="other")
    assert slots("c", engines) == {1: ["d"]}
