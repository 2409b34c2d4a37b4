"""Roles and drains by hand: what is done, what is waited for, and who is not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from gpupoold.config.schema import Settings
from gpupoold.config.sections import LimitSettings
from gpupoold.control.operations import WorkerOperations
from gpupoold.domain import Role
from gpupoold.errors import TimedOut, UsageError
from gpupoold.wire import messages as m
from tests.unit.control.requests.migration_box import MODELS, Box


@pytest.fixture
def box() -> Box:
    return Box(2)


def control_of(box: Box, drain_timeout_s: float = 60.0) -> WorkerOperations:
    settings = SimpleNamespace(limits=LimitSettings(drain_timeout=drain_timeout_s))
    return WorkerOperations(cast(Settings, settings), box.dispatcher, box.workers)


def draining(box: Box) -> list[bool]:
    """What the scheduling core knows."""
    devices = box.dispatcher.state.devices
    return [devices[number].is_draining for number in sorted(devices)]


def give(box: Box, number: int, max_tokens: int = 8) -> str:
    """A request that has a token on one of the workers."""
    other = 1 - number
    box.dispatcher.set_draining(other, is_draining=True)
    request_id = box.ask(max_tokens)
    box.exchange()
    box.workers[number].step(MODELS[0])
    box.exchange()
    box.dispatcher.set_draining(other, is_draining=False)
    assert request_id in box.workers[number].answers
    return request_id


@pytest.mark.parametrize("number", [-1, 2])
async def test_a_worker_that_there_is_not(box: Box, number: int) -> None:
    control = control_of(box)
    with pytest.raises(UsageError, match=f"no device {number}"):
        control.set_role(number, Role.DECODE)
    with pytest.raises(UsageError, match=f"no device {number}"):
        control.undrain(number)
    with pytest.raises(UsageError) as caught:
        await control.drain(number)
    assert caught.value.hint == "the devices are 0 to 1"
    assert draining(box) == [False, False]


def test_a_role_by_hand_outlives_a_restart(box: Box) -> None:
    control_of(box).set_role(1, Role.DECODE)
    devices = box.dispatcher.state.devices
    assert (devices[1].role, devices[1].is_role_fixed) == (Role.DECODE, True)
    box.die(1)
    box.come_up(1)
    assert (devices[1].role, devices[1].is_role_fixed) == (Role.DECODE, True)
    control_of(box).set_role(1, None)
    assert (devices[1].role, devices[1].is_role_fixed) == (Role.DECODE, False)
    assert devices[0].role is Role.MIXED


async def test_an_empty_worker_is_drained_at_once_and_gets_nothing(box: Box) -> None:
    control = control_of(box)
    await control.drain(0)
    assert draining(box) == [True, False]
    request_id = box.ask(2)
    box.exchange()
    assert request_id in box.workers[1].answers
    box.die(0)
    box.come_up(0)
    assert draining(box) == [True, False]  # also when it has been started anew
    control.undrain(0)
    assert draining(box) == [False, False]
    box.settle()


async def test_it_waits_until_all_have_left(box: Box) -> None:
    request_id = give(box, 0)
    drained = asyncio.create_task(control_of(box).drain(0))
    await asyncio.sleep(0)
    while box.workers[0].inbox:
        last = box.heed(0)
    assert last == m.MigrateOut(MODELS[0], request_id)
    await asyncio.sleep(0)
    assert not drained.done()  # it has let it go, but the daemon does not know
    box.exchange()
    await drained
    assert request_id in box.workers[1].coming
    box.settle()


async def test_what_can_go_nowhere_ends_there(box: Box) -> None:
    """The other is being emptied too; the number of those left is told."""
    for _ in range(2):
        give(box, 0)
    box.dispatcher.set_draining(1, is_draining=True)
    with pytest.raises(TimedOut, match="worker 0 still has 2 requests after") as caught:
        await control_of(box, drain_timeout_s=0.05).drain(0)
    assert "gpupool drain" in caught.value.hint
    assert draining(box) == [True, True]
    while box.live:
        box.workers[0].step(MODELS[0])
        box.exchange()
    await control_of(box, drain_timeout_s=0.05).drain(0)


async def test_those_who_are_to_come_to_it_are_waited_for(box: Box) -> None:
    request_id = give(box, 0)
    box.dispatcher.set_role(0, Role.PREFILL)
    box.exchange()
    assert request_id in box.workers[1].coming
    with pytest.raises(TimedOut, match="worker 1 still has 1 requests"):
        await control_of(box, drain_timeout_s=0.05).drain(1)
    box.settle()
