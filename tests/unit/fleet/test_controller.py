"""Tests of ``fleet/controller.py`` with agents that are written down here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.access.rates import RateUse
from gpupoold.api.schemas_access import AddKeyRequest, FleetModel
from gpupoold.api.schemas_models import AddModelRequest, SetModelRequest
from gpupoold.errors import Failed, NoSuchKey, NoSuchModel, Refused, UsageError
from gpupoold.fleet import controller
from gpupoold.fleet.agent import AgentReport, Moment, Order
from gpupoold.fleet.cluster import FleetSpec
from gpupoold.fleet.controller import LOST_S, Controller
from gpupoold.fleet.routing import order
from tests.unit.fleet.fleets import model, report, spec

SECRET = "ab" * 32


class WrittenAgent:
    def __init__(self) -> None:
        self.models: dict[str, FleetModel] = {}
        self.orders: list[tuple[str, str]] = []
        self.failed: dict[str, str] = {}
        self.is_away = False
        self.moments: list[Moment] = []
        self.carries_out = True
        self.keys: dict[str, str] = {}
        self.rate_uses: dict[str, RateUse] = {}
        self.uses_elsewhere: dict[str, RateUse] = {}
        self.peers: dict[str, list[str]] = {}

    async def report(self, moment: Moment, uses_elsewhere: dict[str, RateUse]) -> AgentReport:
        if self.is_away:
            raise ConnectionError("no route")
        self.moments.append(moment)
        self.uses_elsewhere = uses_elsewhere
        found = report(
            *self.models.values(), key_names=dict(self.keys), rate_uses=dict(self.rate_uses)
        )
        return AgentReport(found, failed=dict(self.failed))

    async def carry_out(self, order: Order, moment: Moment) -> None:
        if self.is_away:
            raise ConnectionError("no route")
        self.orders.append((order.kind, order.model))
        if order.kind == "add-key":
            assert isinstance(order.request, AddKeyRequest)
            self.keys[order.request.id] = order.model
        elif order.kind == "remove-key":
            self.keys = {key_id: name for key_id, name in self.keys.items() if name != order.model}
        elif order.kind == "remove":
            self.models.pop(order.model, None)
        elif order.kind == "set":
            assert isinstance(order.request, SetModelRequest)
            change = order.request.model_dump(include={"ttft_s", "tbt_s", "pace"})
            self.models[order.model] = self.models[order.model].model_copy(update=change)
        elif self.carries_out:
            assert isinstance(order.request, AddModelRequest)
            self.peers[order.model] = order.request.peers
            self.models[order.model] = model(order.model)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents = {"a": WrittenAgent(), "b": WrittenAgent()}
        self.now_s = 100.0
        self.restart()

    def restart(self) -> None:
        self.controller = Controller(self.folder, self.agents.__getitem__, lambda: self.now_s)

    async def steps(self, num: int = 8) -> None:
        for _ in range(num):
            await self.controller.step()
            self.now_s += 0.5

    def having(self, name: str) -> list[str]:
        return [node for node, agent in self.agents.items() if name in agent.models]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    for name in rig.agents:
        rig.controller.join(name, f"http://{name}", SECRET)
    return rig


async def test_models_are_placed(rig: Rig) -> None:
    rig.controller.add_model(spec("m"))
    rig.controller.add_model(spec("n", 2))
    await rig.steps(16)
    assert len(rig.having("m")) == 1
    assert rig.having("n") == ["a", "b"]
    table = rig.controller.table
    assert table.secret == SECRET
    assert {one.url for one in table.nodes} == {"http://a", "http://b"}
    await rig.controller.remove_model("n")
    assert rig.having("n") == []
    with pytest.raises(NoSuchModel):
        await rig.controller.remove_model("n")


async def test_a_new_replica_is_told_of_the_nodes_with_the_checkpoint(rig: Rig) -> None:
    rig.controller.add_model(spec("m"))
    await rig.steps()
    (first,) = rig.having("m")
    assert rig.agents[first].peers == {"m": []}
    rig.controller.add_model(spec("m", 2))
    await rig.steps()
    (second,) = {"a", "b"} - {first}
    assert rig.agents[second].peers == {"m": [f"http://{first}"]}


async def test_requests_leave_a_replica_that_is_not_wanted_before_its_removal(rig: Rig) -> None:
    rig.controller.add_model(spec("m", 2))
    await rig.steps(16)
    rig.controller.set_model("m", SetModelRequest(), 1)
    for agent in rig.agents.values():
        agent.models["m"] = model("m", num_live=1)
    await rig.steps()
    assert rig.having("m") == ["a", "b"]
    (retiring,) = [one.name for one in rig.controller.table.nodes if one.retiring]
    (first, *_) = order(rig.controller.table, "m", b"", {})
    assert first.name != retiring
    rig.agents[retiring].models["m"] = model("m")
    await rig.steps()
    assert rig.having("m") == [first.name]
    assert not any(one.retiring for one in rig.controller.table.nodes)


async def test_models_without_a_node_are_known(rig: Rig) -> None:
    for agent in rig.agents.values():
        agent.carries_out = False
    request = AddModelRequest(name="m", source="/m", aliases=["gpt"])
    rig.controller.add_model(FleetSpec(request))
    assert not rig.controller.has_asked.is_set()
    await rig.steps(1)
    assert rig.controller.has_asked.is_set()
    assert rig.controller.table.names() == {"m": "m", "gpt": "m"}


async def test_a_lost_node(rig: Rig) -> None:
    rig.controller.add_model(spec("m"))
    await rig.steps()
    (home,) = rig.having("m")
    other = "b" if home == "a" else "a"
    rig.agents[home].is_away = True
    await rig.steps(2)
    assert "no route" in rig.controller.problems[home]
    assert not rig.having("m")[1:], "not lost yet"
    await rig.steps(int(LOST_S / 0.5) + 8)
    assert rig.agents[other].orders == [("add", "m")]
    # The node comes back: one of the two models is superfluous.
    rig.agents[home].is_away = False
    await rig.steps()
    assert len(rig.having("m")) == 1
    assert not rig.controller.problems


async def test_everything_outlives_the_controller(rig: Rig) -> None:
    rig.controller.add_model(spec("m", 2))
    rig.controller.drain("a", is_draining=True)
    await rig.steps(2)
    before = rig.agents["a"].moments[-1]
    rig.restart()
    await rig.steps(2)
    assert rig.agents["a"].moments[-1].epoch == before.epoch + 1
    assert rig.controller.specs["m"].least_replicas == 2
    assert {one.name: one.is_draining for one in rig.controller.table.nodes} == {
        "a": True,
        "b": False,
    }
    assert rig.controller.table.secret == SECRET


async def test_nothing_is_placed_before_the_nodes_could_report(rig: Rig) -> None:
    rig.controller.add_model(spec("m"))
    await rig.steps()
    (home,) = rig.having("m")
    other = "b" if home == "a" else "a"
    rig.agents[home].is_away = True
    rig.restart()
    await rig.steps(10)
    assert not rig.agents[other].orders
    await rig.steps(20)
    assert rig.agents[other].orders == [("add", "m")]


async def test_a_model_that_cannot_be_added_is_tried_elsewhere(rig: Rig) -> None:
    for agent in rig.agents.values():
        agent.carries_out = False
    rig.agents["a"].failed = {"m": "no room"}
    rig.controller.add_model(spec("m"))
    await rig.steps()
    assert rig.controller.problems == {"m on a": "no room"}
    assert not rig.agents["a"].orders
    assert ("add", "m") in rig.agents["b"].orders


async def test_joining_and_leaving(rig: Rig) -> None:
    with pytest.raises(Refused, match="another secret"):
        rig.controller.join("c", "http://c", "cd" * 32)
    rig.controller.add_model(spec("m"))
    await rig.steps()
    (home,) = rig.having("m")
    rig.controller.leave(home)
    await rig.steps()
    assert rig.having("m") == ["a", "b"], "the daemon that has left keeps its model"
    assert [one.name for one in rig.controller.table.nodes] == [{"a": "b", "b": "a"}[home]]
    with pytest.raises(UsageError, match="no node"):
        rig.controller.leave(home)
    with pytest.raises(UsageError, match="no node"):
        rig.controller.drain("nobody", is_draining=True)


async def test_keys_reach_all_nodes(rig: Rig) -> None:
    rig.agents["b"].is_away = True
    rig.controller.add_key(AddKeyRequest(name="web", id="Ab345678", digest="ab" * 32))
    with pytest.raises(Refused, match="named 'web'"):
        rig.controller.add_key(AddKeyRequest(name="web", id="Cd345678", digest="ab" * 32))
    await rig.steps(int(LOST_S / 0.5) + 16)
    assert rig.agents["a"].orders == [("add-key", "web")]
    rig.restart()
    rig.agents["b"].is_away = False
    await rig.steps()
    assert rig.agents["b"].keys == {"Ab345678": "web"}
    rig.agents["b"].is_away = True
    rig.controller.remove_key("web")
    await rig.steps()
    rig.agents["b"].is_away = False
    await rig.steps()
    assert not rig.agents["a"].keys
    assert not rig.agents["b"].keys
    with pytest.raises(NoSuchKey):
        rig.controller.remove_key("web")


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / controller.FILE).write_text("{")
    with pytest.raises(Failed, match="cannot be read"):
        controller.load(tmp_path)


def test_the_file_is_private(rig: Rig) -> None:
    assert (rig.folder / controller.FILE).stat().st_mode & 0o777 == 0o600


async def test_agents_learn_the_use_of_keys_on_other_nodes(rig: Rig) -> None:
    await rig.steps(1)
    rig.agents["a"].rate_uses = {"web": RateUse(4, 90)}
    await rig.steps(2)
    assert rig.agents["b"].uses_elsewhere == {"web": RateUse(4, 90)}
    assert rig.agents["a"].uses_elsewhere == {}


async def test_changes_of_a_model_reach_all_nodes_once(rig: Rig) -> None:
    rig.controller.add_model(spec("m", 2))
    await rig.steps(12)
    assert rig.having("m") == ["a", "b"]
    rig.agents["b"].is_away = True
    for agent in rig.agents.values():
        agent.orders.clear()
    rig.controller.set_model("m", SetModelRequest(ttft_s=2.5), None)
    await rig.steps(12)
    assert rig.agents["a"].orders == [("set", "m")]
    assert rig.agents["a"].models["m"].ttft_s == 2.5
    rig.agents["b"].is_away = False
    rig.restart()
    await rig.steps(12)
    assert rig.agents["b"].orders == [("set", "m")]
    assert (rig.agents["b"].models["m"].ttft_s, rig.agents["b"].models["m"].tbt_s) == (2.5, 0.1)
    rig.controller.set_model("m", SetModelRequest(), 1)
    assert rig.controller.specs["m"].least_replicas == 1
    assert rig.controller.specs["m"].request.ttft_s == 2.5
    with pytest.raises(NoSuchModel):
        rig.controller.set_model("n", SetModelRequest(ttft_s=2.5), None)
