"""The controller of a fleet: asks the agents, places models, informs the entrances."""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ValidationError

from gpupoold.access.rates import RateUse
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.api.schemas_models import MAX_PEERS, SetModelRequest
from gpupoold.domain import Priority
from gpupoold.errors import Failed, NoSuchKey, NoSuchModel, Refused, UsageError
from gpupoold.files import write_private
from gpupoold.fleet.agent import AgentReport, Moment, Order
from gpupoold.fleet.cluster import FleetSpec, FleetTable, Node
from gpupoold.fleet.placement import Change, changes
from gpupoold.fleet.routing import RateSums

_logger = logging.getLogger(__name__)

PERIOD_S = 0.5
# Rounds between two placements, and between two that may move models for balance.
_PLACES_EVERY, _REBALANCES_EVERY = 4, 60
# Time without a report after which a node is lost; the entrances notice earlier.
LOST_S = 8.0
_REPORT_TIMEOUT_S = 5.0
# Time for first reports after the start, before models are placed anew.
_SETTLING_S = 10.0
# Time until a failed addition is tried again on the same node.
_RETRY_S = 60.0
# Fields of a model that can be changed, equal in all requests and in the reports.
_SETTABLE = ("ttft_s", "tbt_s", "pace")
_settings = operator.attrgetter(*_SETTABLE)

FILE = "fleet.json"


class AgentHandle(Protocol):
    """An agent; both methods raise any exception while the agent cannot be reached."""

    async def report(self, moment: Moment, uses_elsewhere: dict[str, RateUse]) -> AgentReport: ...

    async def carry_out(self, order: Order, moment: Moment) -> None: ...


class Controller:
    """One per fleet, on an event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        folder: Path,
        agent_of: Callable[[str], AgentHandle],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``folder`` has the stored fleet; ``agent_of`` returns the agent of a node by its name.

        Raises Failed: the stored fleet cannot be read or written.
        """
        self._folder = folder
        self._agent_of = agent_of
        self._clock = clock
        self._stored = load(folder)
        self._stored.epoch += 1
        self._save()
        self._tick = 0
        self._began_s = clock()
        self._nodes: dict[str, Node] = {}
        self._problems: dict[str, str] = {}
        self.has_asked = asyncio.Event()
        """Set when all agents have been asked once; before, nodes are missing in the table."""
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}
        self._retiring: dict[str, frozenset[str]] = {}
        self._rate_sums = RateSums()

    @property
    def table(self) -> FleetTable:
        placed = {
            name: model.request.name
            for model in self._stored.models.values()
            for name in (model.request.name, *model.request.aliases)
        }
        priorities = {
            key.id: Priority(key.priority)
            for key in self._stored.keys.values()
            if key.priority != "normal"
        }
        nodes = tuple(self._nodes.values())
        return FleetTable(self._tick, self._stored.secret, nodes, placed, priorities)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons of missing reports by node, and of failed additions by model and node."""
        of_models = {f"{name} on {node}": why for (name, node), (_, why) in self._failed.items()}
        return self._problems | of_models

    @property
    def specs(self) -> dict[str, FleetSpec]:
        return dict(self._stored.models)

    def join(self, name: str, url: str, secret: str) -> None:
        """Add a node, or change the URL of a known node.

        Raises Refused: the fleet has another secret.
        """
        if self._stored.secret not in ("", secret):
            raise Refused("the fleet has another secret", "join with the secret of its first node")
        self._stored.secret = secret
        self._stored.nodes[name] = StoredNode(url=url)
        self._save()

    def leave(self, name: str) -> None:
        """Forget a node; the node's models are placed on other nodes.

        Raises UsageError: the fleet has no such node.
        """
        self._check_node(name)
        del self._stored.nodes[name]
        self._nodes.pop(name, None)
        self._problems.pop(name, None)
        self._save()

    def drain(self, name: str, *, is_draining: bool) -> None:
        """Drain a node, so that models and requests go to other nodes; or end the drain.

        Raises UsageError: the fleet has no such node.
        """
        self._check_node(name)
        self._stored.nodes[name].is_draining = is_draining
        self._save()

    def add_model(self, spec: FleetSpec) -> None:
        """Place a model from now on; a changed request holds for later additions."""
        self._stored.models[spec.name] = spec
        self._failed = {place: why for place, why in self._failed.items() if place[0] != spec.name}
        self._save()

    def set_model(self, name: str, change: SetModelRequest, least_replicas: int | None) -> None:
        """Change targets and pace of a model on all nodes, also on nodes that come back later.

        ``change`` has no other fields; None keeps a value. Raises NoSuchModel: the fleet does not
        place such a model.
        """
        spec = self._stored.models.get(name)
        if spec is None:
            raise NoSuchModel(f"the fleet has no model {name}")
        changed = change.model_dump(include={*_SETTABLE}, exclude_none=True)
        self._stored.models[name] = FleetSpec(
            spec.request.model_copy(update=changed), least_replicas or spec.least_replicas
        )
        self._save()

    async def remove_model(self, name: str) -> None:
        """Remove a model from the fleet and from all nodes.

        Raises NoSuchModel: the fleet does not place such a model.
        """
        if name not in self._stored.models:
            raise NoSuchModel(f"the fleet has no model {name}")
        del self._stored.models[name]
        self._save()
        having = [node for node in self._nodes.values() if node.model(name) is not None]
        await asyncio.gather(
            *(self._order(Change("remove", name, node.name, "")) for node in having)
        )

    def add_key(self, request: AddKeyRequest) -> None:
        """Give all nodes an API key, with its id and digest.

        Raises Refused: the fleet has a key of this name.
        """
        if request.name in self._stored.keys:
            raise Refused(f"the fleet has a key named {request.name!r}", "choose another name")
        self._stored.keys[request.name] = request
        self._save()

    def remove_key(self, name: str) -> None:
        """Remove an API key from all nodes, also from nodes that come back later.

        Raises NoSuchKey: the fleet has no such key.
        """
        key = self._stored.keys.pop(name, None)
        if key is None:
            raise NoSuchKey(f"the fleet has no key {name}")
        self._stored.removed_keys.append(key.id)
        self._save()

    async def run(self) -> None:
        """Ask and place again and again."""
        while True:
            began_s = self._clock()
            try:
                await self.step()
            except Exception:
                _logger.exception("a round of the fleet's controller")
            await asyncio.sleep(max(0.05, PERIOD_S - (self._clock() - began_s)))

    async def step(self) -> None:
        """Ask all agents for a report; place models every few rounds."""
        self._tick += 1
        names = list(self._stored.nodes)
        await asyncio.gather(*(self._ask(name) for name in names))
        self.has_asked.set()
        is_settled = self._clock() - self._began_s >= _SETTLING_S or not self._problems
        if is_settled and self._tick % _PLACES_EVERY == 0:
            await self._place(rebalances=self._tick % _REBALANCES_EVERY == 0)
            await self._share_keys()
            await self._share_settings()

    @property
    def _moment(self) -> Moment:
        return Moment(self._stored.epoch, self._tick)

    async def _ask(self, name: str) -> None:
        stored = self._stored.nodes[name]
        try:
            elsewhere = self._rate_sums.elsewhere(name)
            asked = self._agent_of(name).report(self._moment, elsewhere)
            found = await asyncio.wait_for(asked, _REPORT_TIMEOUT_S)
        except Exception as error:
            self._not_seen(name, f"the agent does not answer: {str(error) or type(error).__name__}")
            return
        now_s = self._clock()
        for model, why in found.failed.items():
            self._failed.setdefault((model, name), (now_s, why))
        if name not in self._stored.nodes:  # has left meanwhile
            return
        if found.report is None:
            self._not_seen(name, found.problem)
            return
        self._problems.pop(name, None)
        self._rate_sums.counted(name, found.report.rate_uses)
        self._nodes[name] = Node(
            name,
            stored.url,
            found.report,
            now_s,
            stored.is_draining,
            ongoing=frozenset(found.ongoing),
            retiring=self._retiring.get(name, frozenset()),
        )

    def _not_seen(self, name: str, why: str) -> None:
        self._problems[name] = why
        node = self._nodes.get(name)
        if node is not None and self._clock() - node.seen_s > LOST_S and not node.is_lost:
            _logger.warning("node %s is lost: %s", name, why)
            self._nodes[name] = replace(node, is_lost=True)

    async def _place(self, *, rebalances: bool) -> None:
        now_s = self._clock()
        self._failed = {
            key: (at_s, why) for key, (at_s, why) in self._failed.items() if now_s < at_s + _RETRY_S
        }
        for name, node in self._nodes.items():
            failed = frozenset(what for what, at in self._failed if at == name)
            self._nodes[name] = replace(node, failed=failed)
        # In a thread, because reports go on meanwhile.
        due = await asyncio.to_thread(changes, self.specs, dict(self._nodes), rebalances=rebalances)
        retiring = [(change.node, change.model) for change in due if change.kind == "retire"]
        self._retiring = {
            node: frozenset(model for at, model in retiring if at == node) for node, _ in retiring
        }
        await asyncio.gather(*(self._order(change) for change in due))

    async def _share_keys(self) -> None:
        """Add the fleet's keys where they are missing, and remove removed keys."""
        orders = []
        for node in self._seen():
            having = node.report.key_names
            for key in self._stored.keys.values():
                order = Order("add-key", key.name, key)
                if key.id not in having and order.subject not in node.ongoing | node.failed:
                    orders.append((node.name, order))
            for key_id in self._stored.removed_keys:
                if key_id in having:
                    orders.append((node.name, Order("remove-key", having[key_id])))
        await asyncio.gather(*(self._ask_to(node, order) for node, order in orders))

    async def _share_settings(self) -> None:
        """Change the models whose targets or pace differ from the fleet's."""
        orders = []
        for node in self._seen():
            for model in node.report.models:
                spec = self._stored.models.get(model.name)
                if spec is None or model.name in node.ongoing | node.failed:
                    continue
                wanted = _settings(spec.request)
                if wanted != _settings(model):
                    change = dict(zip(_SETTABLE, wanted, strict=True))
                    order = Order("set", model.name, SetModelRequest.model_validate(change))
                    orders.append((node.name, order))
        await asyncio.gather(*(self._ask_to(node, order) for node, order in orders))

    async def _order(self, change: Change) -> None:
        if change.kind == "retire":  # the entrances carry it out
            return
        spec = self._stored.models.get(change.model)
        request = None
        if spec is not None and change.kind == "add":
            peers = [node.url for node in self._seen() if node.serves(change.model)][:MAX_PEERS]
            request = spec.request.model_copy(update={"peers": peers})
        _logger.info("%s %s on %s: %s", change.kind, change.model, change.node, change.why)
        await self._ask_to(change.node, Order(change.kind, change.model, request))

    def _seen(self) -> list[Node]:
        """Return the nodes that are not lost; orders to a lost node would hold up the round."""
        return [node for node in self._nodes.values() if not node.is_lost]

    async def _ask_to(self, node: str, order: Order) -> None:
        try:
            asked = self._agent_of(node).carry_out(order, self._moment)
            await asyncio.wait_for(asked, _REPORT_TIMEOUT_S)
        except Exception as error:
            _logger.warning("%s could not be asked: %s", node, error)

    def _check_node(self, name: str) -> None:
        if name not in self._stored.nodes:
            known = ", ".join(sorted(self._stored.nodes)) or "none"
            raise UsageError(f"the fleet has no node {name}", f"its nodes: {known}")

    def _save(self) -> None:
        save(self._folder, self._stored)


class StoredNode(BaseModel):
    """A node; ``url`` is the daemon's address for the entrance."""

    url: str
    is_draining: bool = False


class Stored(BaseModel):
    """The whole file.

    ``epoch`` counts the starts of controllers. ``keys`` are API keys by name, ``removed_keys`` the
    ids of keys to be removed from all nodes.
    """

    epoch: int = 0
    secret: str = ""
    nodes: dict[str, StoredNode] = {}
    models: dict[str, FleetSpec] = {}
    keys: dict[str, AddKeyRequest] = {}
    removed_keys: list[str] = []


def load(folder: Path) -> Stored:
    """Return the stored fleet, an empty fleet without a file.

    Raises Failed: the file cannot be read.
    """
    path = folder / FILE
    try:
        return Stored.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Stored()
    except (OSError, ValidationError) as error:
        raise Failed(f"{path} cannot be read: {error}", "restore or remove the file") from error


def save(folder: Path, stored: Stored) -> None:
    """Replace the file atomically; only the owner may read the file.

    Raises Failed: the file cannot be written.
    """
    path = folder / FILE
    try:
        write_private(path, stored.model_dump_json(indent=1))
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error}") from error
