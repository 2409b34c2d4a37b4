"""Parked devices on two played workers: who is parked, who is woken, and what models are told."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import History, Registry
from gpupoold.api.schemas_models import Progress
from gpupoold.config.sections import IdleSettings
from gpupoold.control.models.parking import Parking
from gpupoold.errors import Refused, UsageError
from gpupoold.wire import messages as m
from tests.unit.control.models.models_box import TIMEOUT_S, ModelsBox, running


@pytest_asyncio.fixture
async def box(tmp_path: Path, registry: Registry, history: History) -> AsyncIterator[ModelsBox]:
    box = ModelsBox(tmp_path, registry, history, load_timeout_s=TIMEOUT_S)
    async with running(box, "a", "b"):
        await box.until(lambda: all(one.has_loaded for one in box.supervisor.workers))
        box.told.clear()
        yield box


def parking_of(box: ModelsBox, park_after_s: float = 0.0) -> Parking:
    parking = box.lifecycle.parking
    object.__setattr__(parking._settings, "idle", IdleSettings(park_after=park_after_s))
    return parking


def states(box: ModelsBox) -> list[str]:
    return [one.state for one in box.supervisor.workers]


async def park_all(box: ModelsBox) -> None:
    for number in (0, 1):
        await parking_of(box).park(number)
    assert all(one.pid is None for one in box.supervisor.workers)


async def test_a_parked_device_has_no_process_and_no_models(box: ModelsBox) -> None:
    await parking_of(box).park(0)
    assert box.supervisor.workers[0].pid is None
    await parking_of(box).park(0)  # has no effect
    assert states(box) == ["parked", "ready"]
    assert box.hosts_of("a") == box.hosts_of("b") == [1]
    assert box.supervisor.workers[0].num_restarts == 0
    events = await box.events()
    assert events.count("device_parked") == 1
    assert "worker_down" not in events


async def test_models_stay_ready_while_all_is_parked(box: ModelsBox) -> None:
    await park_all(box)
    for name in ("a", "b"):
        assert box.fleet.availability(name).can_serve
    assert box.supervisor.any_in_service
    assert not box.supervisor.any_ready
    assert box.frontends.states() == {"a": "ready", "b": "ready"}


async def test_a_request_wakes_one_device_for_its_model(box: ModelsBox) -> None:
    await park_all(box)
    box.ask("b", "r1")
    box.ask("b", "r2")
    await box.until(lambda: box.hosts_of("b") == [1] or box.hosts_of("b") == [0])
    await box.until(lambda: sum(map(len, box.requests.values())) == 2)
    assert sorted(states(box)) == ["parked", "ready"]
    assert box.hosts_of("a") == []  # until somebody asks
    assert (await box.events()).count("device_woken") == 1


async def test_a_device_with_requests_is_not_parked(box: ModelsBox) -> None:
    box.ask("a", "r")
    await box.until(lambda: bool(box.requests))
    [number] = box.requests
    with pytest.raises(Refused, match="has requests"):
        await parking_of(box).park(number)
    with pytest.raises(UsageError, match="there is no device 2"):
        await parking_of(box).park(2)
    with pytest.raises(UsageError, match="there is no device 2"):
        parking_of(box).wake(2)


async def test_idle_devices_are_parked_one_by_one(box: ModelsBox) -> None:
    parking = parking_of(box, 60.0)
    box.ask("a", "r")
    await box.until(lambda: bool(box.requests))
    [busy] = box.requests
    for now_s in (1000.0, 1059.0):
        parking.check(now_s)
        await asyncio.sleep(0)
    assert states(box) == ["ready", "ready"]
    parking.check(1061.0)
    await box.until(lambda: parking._parking is not None and parking._parking.done())
    assert states(box)[1 - busy] == "parked"
    assert box.supervisor.workers[1 - busy].pid is None
    parking.check(1200.0)
    assert states(box)[busy] == "ready"
    worker = box.supervisor.workers[busy]
    done = [m.RequestProgress("r", [5], "stop")]
    box.dispatcher.from_worker(worker, m.StepOutputs("a", time.monotonic(), [], done))
    parking.check(1300.0)
    parking.check(1361.0)
    await box.until(lambda: states(box) == ["parked", "parked"])


async def test_devices_stay_while_a_model_is_added(box: ModelsBox) -> None:
    """The device was large enough in a check that ended, and the load has not begun."""
    parking = parking_of(box, 60.0)

    async def steps() -> AsyncGenerator[Progress, None]:
        yield Progress(stage="check")

    addition = box.lifecycle.ongoing.followed("new", steps())
    await anext(addition)
    for now_s in (1000.0, 1061.0, 2000.0):
        parking.check(now_s)
        await asyncio.sleep(0)
    assert states(box) == ["ready", "ready"]
    await addition.aclose()
    for now_s in (2001.0, 2060.0):
        parking.check(now_s)
        await asyncio.sleep(0)
    assert states(box) == ["ready", "ready"]
    parking.check(2062.0)
    await box.until(lambda: "parked" in states(box))


async def test_nothing_is_parked_without_the_setting(box: ModelsBox) -> None:
    parking = parking_of(box)
    for now_s in (1.0, 1e6, 1e9):
        parking.check(now_s)
        await asyncio.sleep(0)
    assert states(box) == ["ready", "ready"]


async def test_a_load_elsewhere_wakes_no_device(box: ModelsBox) -> None:
    parking = parking_of(box)
    await park_all(box)
    box.hold(0, 1)
    box.ask("a", "r")
    await box.until(lambda: bool(box.waiting))
    parking.check(asyncio.get_running_loop().time() + 100.0)
    assert sorted(states(box)) == ["parked", "ready"]
    box.release()
    await box.until(lambda: bool(box.requests))


async def test_a_model_that_no_device_in_service_may_have(box: ModelsBox) -> None:
    parking = parking_of(box)
    await box.registry.set_devices("a", [1])
    box.fleet.changed((await box.registry.get("a")).spec)  # type: ignore[union-attr]
    await parking.park(1)
    await parking.park(0)
    parking.wake(0)
    await box.until(lambda: states(box)[0] == "ready")
    box.ask("a", "r")
    parking.check(asyncio.get_running_loop().time() + 100.0)
    await box.until(lambda: box.requests.get(1) == ["r"])


async def test_waiting_for_a_worker_wakes_it(box: ModelsBox) -> None:
    await park_all(box)
    await box.supervisor.wait_ready(box.supervisor.workers[1])
    assert states(box) == ["parked", "ready"]


async def test_a_woken_worker_that_dies_is_restarted_as_ever(box: ModelsBox) -> None:
    await park_all(box)
    parking_of(box).wake(0)
    await box.until(lambda: states(box)[0] == "ready")
    box.processes[0].end(-signal.SIGKILL)
    await box.until(lambda: box.supervisor.workers[0].num_restarts == 1)
    await box.until(lambda: states(box)[0] == "ready")


async def test_a_device_is_woken_before_its_process_has_ended(box: ModelsBox) -> None:
    await parking_of(box).park(0)
    parking_of(box).wake(0)
    assert states(box)[0] == "starting"
    await box.until(lambda: states(box)[0] == "ready")
    assert box.supervisor.workers[0].num_restarts == 0
