"""Tests of ``fleet/agent.py``, beside an admin API that is written down here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest

from gpupoold.access.rates import RateUse
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_access import FleetReport
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.errors import Failed, NoSuchModel, Refused
from gpupoold.fleet.agent import Agent, Moment, Order
from tests.unit.fleet.fleets import model, report


class WrittenDaemon:
    """Keeps what it is asked; adding waits for ``may_add``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.charged: list[dict[str, RateUse]] = []
        self.may_add = threading.Event()
        self.problem: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def fleet_report(self) -> FleetReport:
        if self.problem is not None:
            raise self.problem
        return report(model("m"))

    def charge_keys(self, uses: dict[str, RateUse]) -> FleetReport:
        self.charged.append(uses)
        return report()

    def set_fleet_secret(self, secret: str) -> FleetReport:
        self.asked.append(("secret", secret))
        return report()

    def add_model(self, request: AddModelRequest) -> Iterator[None]:
        self.asked.append(("add", request.name))
        assert self.may_add.wait(10)
        if self.problem is not None:
            raise self.problem
        yield None

    def remove_model(self, name: str, mode: str) -> None:
        self.asked.append(("remove", name, mode))
        raise NoSuchModel(f"no model {name}")

    def warm(self, name: str) -> None:
        self.asked.append(("warm", name))


@pytest.fixture
def daemon() -> WrittenDaemon:
    return WrittenDaemon()


@pytest.fixture
def agent(daemon: WrittenDaemon) -> Agent:
    return Agent(Path("/nowhere"), lambda path: cast(AdminClient, daemon))


def order(kind: Any, name: str = "m") -> Order:
    return Order(kind, name, AddModelRequest(name=name) if kind == "add" else None)


async def test_a_report(agent: Agent, daemon: WrittenDaemon) -> None:
    found = await agent.report(Moment(1, 1), {})
    assert found.report is not None
    assert found.report.models[0].name == "m"
    daemon.problem = Failed("no daemon")
    found = await agent.report(Moment(1, 2), {})
    assert (found.report, found.problem) == (None, "no daemon")
    daemon.problem = None
    assert (await agent.report(Moment(1, 3), {})).report is not None


async def test_orders(agent: Agent, daemon: WrittenDaemon) -> None:
    assert (await agent.join("s")).is_ready
    await agent.carry_out(order("add"), Moment(1, 1))
    assert (await agent.report(Moment(1, 1), {})).ongoing == ("m",)
    with pytest.raises(Refused, match="is being changed"):
        await agent.carry_out(order("remove"), Moment(1, 1))
    daemon.may_add.set()
    await until_idle(agent)
    await agent.carry_out(order("remove"), Moment(1, 1))
    await until_idle(agent)
    await agent.carry_out(order("warm"), Moment(1, 1))
    await until_idle(agent)
    assert daemon.asked == [("secret", "s"), ("add", "m"), ("remove", "m", "drain"), ("warm", "m")]
    assert not (await agent.report(Moment(1, 1), {})).failed


async def test_growth_of_use_elsewhere_is_charged_once(agent: Agent, daemon: WrittenDaemon) -> None:
    await agent.report(Moment(1, 1), {"web": RateUse(5, 500)})  # from before this agent
    await agent.report(Moment(1, 2), {"web": RateUse(7, 500), "app": RateUse(1, 0)})
    await agent.report(Moment(1, 3), {"web": RateUse(7, 500), "app": RateUse(1, 0)})
    await agent.report(Moment(1, 2), {"web": RateUse(6, 500)})  # late
    await agent.report(Moment(1, 4), {"web": RateUse(7, 530), "app": RateUse(1, 0)})
    await agent.report(Moment(2, 1), {"web": RateUse(0, 1)})  # another controller
    assert daemon.charged == [{"web": RateUse(2, 0), "app": RateUse(1, 0)}, {"web": RateUse(0, 30)}]


async def test_failures_are_told_until_the_next_order(agent: Agent, daemon: WrittenDaemon) -> None:
    daemon.may_add.set()
    daemon.problem = Refused("no room")
    await agent.carry_out(order("add"), Moment(1, 1))
    await until_idle(agent)
    daemon.problem = None
    assert (await agent.report(Moment(1, 1), {})).failed == {"m": "no room"}
    await agent.carry_out(order("add"), Moment(1, 1))
    await until_idle(agent)
    assert not (await agent.report(Moment(1, 1), {})).failed


async def test_orders_of_the_past_are_refused(agent: Agent, daemon: WrittenDaemon) -> None:
    """Those of an earlier controller, and those that a divided network delivers late."""
    await agent.report(Moment(2, 50), {})
    for moment in (Moment(1, 99), Moment(2, 50 - Agent.MAX_TICKS_LATE - 1)):
        with pytest.raises(Refused, match="came after"):
            await agent.carry_out(order("warm"), moment)
        with pytest.raises(Refused, match="came after"):
            await agent.report(moment, {})
    await agent.carry_out(order("warm"), Moment(2, 50 - Agent.MAX_TICKS_LATE))
    await until_idle(agent)
    await agent.report(Moment(3, 1), {})
    with pytest.raises(Refused):
        await agent.carry_out(order("warm"), Moment(2, 60))
    assert daemon.asked == [("warm", "m")]


async def until_idle(agent: Agent) -> None:
    while agent._ongoing:
        await asyncio.sleep(0.01)
