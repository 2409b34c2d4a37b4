"""The fleet's parts as actors of Ray, and the entrance as a deployment of Ray Serve.

Imported in processes of the cluster only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gpupoold.access.rates import RateUse
from gpupoold.api.schemas_access import AddKeyRequest, FleetReport
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.errors import Failed
from gpupoold.fleet import cluster
from gpupoold.fleet.agent import Agent, AgentReport, Moment, Order
from gpupoold.fleet.asgi import Receive, Scope, Send
from gpupoold.fleet.controller import Controller
from gpupoold.fleet.entrance import Entrance

APPLICATION = "gpupool"
_PUBLISHES_EVERY_S = 0.25
_MAX_ONGOING = 10_000
_ANSWER_TIMEOUT_S = 30.0

_logger = logging.getLogger("ray.serve")


class AgentActor:
    """An :class:`.agent.Agent` in a process on the node."""

    def __init__(self, socket_path: str) -> None:
        self._agent = Agent(Path(socket_path))

    async def join(self, secret: str) -> FleetReport:
        return await self._agent.join(secret)

    async def report(self, moment: Moment, uses_elsewhere: dict[str, RateUse]) -> AgentReport:
        return await self._agent.report(moment, uses_elsewhere)

    async def carry_out(self, order: Order, moment: Moment) -> None:
        await self._agent.carry_out(order, moment)


class _RemoteAgent:
    """An agent found by name, and found anew after each failure: a node may come back."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._actor: Any = None

    async def report(self, moment: Moment, uses_elsewhere: dict[str, RateUse]) -> AgentReport:
        found: AgentReport = await self._call("report", moment, uses_elsewhere)
        return found

    async def carry_out(self, order: Order, moment: Moment) -> None:
        await self._call("carry_out", order, moment)

    async def _call(self, method: str, *arguments: object) -> Any:
        try:
            if self._actor is None:
                # In a thread, because Ray asks the head and waits.
                self._actor = await asyncio.to_thread(
                    ray.get_actor, cluster.agent_name(self._node), cluster.NAMESPACE
                )
            return await getattr(self._actor, method).remote(*arguments)
        except (RayError, ValueError):
            self._actor = None
            raise


class ControllerActor:
    """The :class:`.controller.Controller` on the head, which works from the first call on."""

    def __init__(self, folder: str) -> None:
        agents: dict[str, _RemoteAgent] = {}

        def agent_of(name: str) -> _RemoteAgent:
            return agents.setdefault(name, _RemoteAgent(name))

        self._controller = Controller(Path(folder), agent_of)
        self._running: asyncio.Task[None] | None = None

    async def table(self) -> cluster.FleetTable:
        self._run()
        # After a start, an entrance keeps the table of the controller before until then.
        await self._controller.has_asked.wait()
        return self._controller.table

    async def state(
        self,
    ) -> tuple[cluster.FleetTable, dict[str, cluster.FleetSpec], dict[str, str]]:
        """Return the table, the models placed by the fleet, and the problems."""
        self._run()
        await self._controller.has_asked.wait()
        return self._controller.table, self._controller.specs, self._controller.problems

    async def join(self, name: str, url: str, secret: str) -> None:
        self._run()
        self._controller.join(name, url, secret)

    async def leave(self, name: str) -> None:
        self._controller.leave(name)

    async def drain(self, name: str, is_draining: bool) -> None:
        self._controller.drain(name, is_draining=is_draining)

    async def add_model(self, spec: cluster.FleetSpec) -> None:
        self._controller.add_model(spec)

    async def set_model(
        self, name: str, change: SetModelRequest, least_replicas: int | None
    ) -> None:
        self._controller.set_model(name, change, least_replicas)

    async def remove_model(self, name: str) -> None:
        await self._controller.remove_model(name)

    async def add_key(self, request: AddKeyRequest) -> None:
        self._controller.add_key(request)

    async def remove_key(self, name: str) -> None:
        self._controller.remove_key(name)

    def _run(self) -> None:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._controller.run())


class EntranceApp:
    """An :class:`.entrance.Entrance` in a replica of Ray Serve, informed by the controller."""

    def __init__(self) -> None:
        self._entrance = Entrance()
        self._following: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._entrance(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._entrance.start()
        self._following = asyncio.create_task(self._follow())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._following.cancel()
        await self._entrance.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _follow(self) -> None:
        """Fetch the controller's table periodically; without an answer the last table stays."""
        controller: Any = None
        while True:
            try:
                if controller is None:
                    controller = await asyncio.to_thread(
                        ray.get_actor, cluster.CONTROLLER, cluster.NAMESPACE
                    )
                table = await asyncio.wait_for(controller.table.remote(), _ANSWER_TIMEOUT_S)
                self._entrance.replace(table)
            except (RayError, ValueError, TimeoutError) as error:
                _logger.warning("the fleet's controller does not answer: %s", error)
                controller = None
            await asyncio.sleep(_PUBLISHES_EVERY_S)


def build_entrance() -> EntranceApp:
    return EntranceApp()


def stop_entrance() -> None:
    serve.shutdown()


def start_agent(name: str, ray_node_id: str, socket_path: Path) -> Any:
    """Start the agent of a node, or start a new agent; return the handle."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(cluster.agent_name(name), cluster.NAMESPACE))
    actor = _detached(AgentActor, cluster.agent_name(name), ray_node_id, max_concurrency=100)
    return actor.remote(str(socket_path))


def start_controller(ray_node_id: str, folder: Path) -> Any:
    """Start the controller on the head unless running; return the handle."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(cluster.CONTROLLER, cluster.NAMESPACE)
    actor = _detached(ControllerActor, cluster.CONTROLLER, ray_node_id, max_concurrency=1000)
    return actor.remote(str(folder))


def _detached(kind: type, name: str, ray_node_id: str, *, max_concurrency: int) -> Any:
    """Return the class of an actor on one node, which Ray starts again after each death."""
    return ray.remote(kind).options(
        name=name,
        namespace=cluster.NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        max_concurrency=max_concurrency,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
    )


def start_entrance(options: cluster.EntranceOptions) -> None:
    """Start the entrance on the head, or on every node of the fleet."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    location = "EveryNode" if options.is_everywhere else "HeadOnly"
    http_options = {"host": options.host, "port": options.port}
    serve.start(proxy_location=location, http_options=http_options)
    deployment = serve.deployment(
        num_replicas=options.num_replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(build_entrance)())
    serve.run(deployment.bind(), name=APPLICATION, route_prefix="/")


def ray_node_id(ip: str) -> str:
    """Return Ray's id of the living node with an address.

    Raises Failed: the cluster has no such node.
    """
    nodes: list[dict[str, Any]] = ray.nodes()
    for node in nodes:
        if node["Alive"] and node["NodeManagerAddress"] == ip:
            found: str = node["NodeID"]
            return found
    raise Failed(f"Ray has no node with the address {ip}")
