"""The operations of ``gpupool fleet``; each function connects to the cluster and disconnects."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpupoold.access.fleet import is_secret, make_secret
from gpupoold.access.secret import make_key
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.errors import Failed, GpupoolError, Refused, UsageError
from gpupoold.fleet import cluster
from gpupoold.fleet.cluster import (
    EntranceOptions as EntranceOptions,
    FleetSpec,
    FleetTable,
    NodeMembership,
)

_TIMEOUT_S = 30.0
_WILDCARDS = ("0.0.0.0", "::")  # compared with, not listened on


@dataclass(frozen=True, slots=True)
class FleetState:
    """The controller's view of the fleet."""

    table: FleetTable
    specs: dict[str, FleetSpec]
    problems: dict[str, str]


def up(
    socket_path: Path,
    name: str,
    ip: str,
    url: str,
    ray_port: int,
    entrance: EntranceOptions,
    ray_address: str | None = None,
) -> NodeMembership:
    """Start a fleet with this node as head.

    ``ray_address`` names an existing cluster of Ray. An empty ``url`` means the daemon's address.
    Raises GpupoolError: the daemon or Ray does not answer, or the node is in a fleet.
    """
    folder, secret = _daemons(socket_path)
    _check_free(folder)
    membership = NodeMembership(
        name=name,
        ip=ip,
        ray_address=ray_address or f"{ip}:{ray_port}",
        is_head=True,
        owns_ray=ray_address is None,
        url=url,
        entrance=entrance,
    )
    _enter(socket_path, folder, membership, secret or make_secret())
    cluster.write_membership(folder, membership)
    return membership


def join(
    socket_path: Path, address: str, secret: str, name: str, ip: str, url: str, *, owns_ray: bool
) -> NodeMembership:
    """Let this node join a fleet.

    Raises GpupoolError: as :func:`up`; or the fleet has another secret.
    """
    if not is_secret(secret):
        raise UsageError(
            "a fleet's secret has 64 hexadecimal digits", "`gpupool fleet secret` prints it"
        )
    folder, _ = _daemons(socket_path)
    _check_free(folder)
    membership = NodeMembership(
        name=name, ip=ip, ray_address=address, is_head=False, owns_ray=owns_ray, url=url
    )
    _enter(socket_path, folder, membership, secret)
    cluster.write_membership(folder, membership)
    return membership


def resume(socket_path: Path) -> NodeMembership:
    """Enter the fleet again after a restart of the machine.

    Raises GpupoolError: as :func:`up`; or the node is in no fleet.
    """
    folder, secret = _daemons(socket_path)
    membership = cluster.read_membership(folder)
    cluster.end_ray(membership)
    _enter(socket_path, folder, membership, secret)
    return membership


def leave(socket_path: Path) -> NodeMembership:
    """Take this node out of the fleet; the daemon keeps all models.

    Raises Refused: the node is in no fleet.
    """
    folder, secret = _daemons(socket_path)
    membership = cluster.read_membership(folder)
    with contextlib.suppress(Failed), cluster.connected(secret, membership) as ray:
        from gpupoold.fleet import actors

        if membership.is_head:
            actors.stop_entrance()
        _ask(ray, "leave", membership.name)
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(cluster.agent_name(membership.name), cluster.NAMESPACE))
    cluster.end_ray(membership)
    with AdminClient(socket_path) as client:
        client.set_fleet_secret("")
    cluster.write_membership(folder, None)
    return membership


def secret_of(socket_path: Path) -> str:
    """Return the secret of this node's fleet. Raises Refused: the node is in no fleet."""
    _, found = _daemons(socket_path)
    if not found:
        raise Refused("this node is in no fleet", "start one with `gpupool fleet up`")
    return found


@contextlib.contextmanager
def watching(socket_path: Path) -> Iterator[Callable[[], FleetState]]:
    """Connect; yield a function that returns the present state; errors as :func:`state`."""
    with _controller(socket_path) as ask:
        yield lambda: FleetState(*ask("state"))


def state(socket_path: Path) -> FleetState:
    """Return the fleet's state.

    Raises Refused, Failed: this node is in no fleet, or the fleet does not answer.
    """
    with watching(socket_path) as state_now:
        return state_now()


def drain(socket_path: Path, name: str, *, is_draining: bool) -> None:
    """Drain a node, or end that; errors as :func:`state`, and UsageError for an unknown node."""
    with _controller(socket_path) as ask:
        ask("drain", name, is_draining)


def add_model(socket_path: Path, spec: FleetSpec) -> None:
    """Let the fleet place a model; errors as :func:`state`."""
    with _controller(socket_path) as ask:
        ask("add_model", spec)


def set_model(
    socket_path: Path, name: str, change: SetModelRequest, least_replicas: int | None
) -> None:
    """Change a model on all nodes; errors as :func:`state`, and NoSuchModel."""
    with _controller(socket_path) as ask:
        ask("set_model", name, change, least_replicas)


def remove_model(socket_path: Path, name: str) -> None:
    """Remove a model from all nodes; errors as :func:`state`, and NoSuchModel."""
    with _controller(socket_path) as ask:
        ask("remove_model", name)


def add_key(socket_path: Path, request: AddKeyRequest) -> str:
    """Give all nodes a new API key; return the text, which is not stored.

    Raises Refused, Failed: as :func:`state`; or the fleet has a key of this name.
    """
    key = make_key()
    known = request.model_copy(update={"id": key.id, "digest": key.digest})
    with _controller(socket_path) as ask:
        ask("add_key", known)
    return key.text


def remove_key(socket_path: Path, name: str) -> None:
    """Remove an API key from all nodes; errors as :func:`state`, and NoSuchKey."""
    with _controller(socket_path) as ask:
        ask("remove_key", name)


def own_ip(address: str | None = None) -> str:
    """Return the address of this machine for connections to an address, or to the Internet."""
    host = "192.0.2.1" if address is None else urlsplit(f"//{address}").hostname or address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            found: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return found


def _daemons(socket_path: Path) -> tuple[Path, str]:
    """Return the state folder of the daemon, and the secret, empty without a fleet."""
    with AdminClient(socket_path) as client:
        return Path(client.status().state_dir), client.fleet_report().secret


def _enter(socket_path: Path, folder: Path, node: NodeMembership, secret: str) -> None:
    """Start Ray on this node, the agent, and on the head the controller and the entrance."""
    cluster.start_ray(secret, node)
    try:
        with cluster.connected(secret, node) as ray:
            from gpupoold.fleet import actors

            if node.is_head:
                actors.start_controller(actors.ray_node_id(node.ip), folder)
            _join(ray, socket_path, node, node.url, secret)
            if node.entrance is not None:
                actors.start_entrance(node.entrance)
    except BaseException:
        cluster.end_ray(node)
        raise


def _join(ray: Any, socket_path: Path, node: NodeMembership, url: str, secret: str) -> None:
    from gpupoold.fleet import actors

    agent = actors.start_agent(node.name, actors.ray_node_id(node.ip), socket_path.resolve())
    report = _get(ray, agent.join.remote(secret))
    url = url or _reachable(report.http_url, node.ip)
    _ask(ray, "join", node.name, url, secret)


def _reachable(http_url: str, ip: str) -> str:
    """Return the daemon's URL for other nodes."""
    found = urlsplit(http_url)
    host = found.hostname or ""
    if host in _WILDCARDS:
        return f"{found.scheme}://{ip}:{found.port}"
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if is_loopback and not ipaddress.ip_address(ip).is_loopback:
        raise Refused(
            f"the daemon listens on {http_url}, where other nodes cannot reach it",
            f"set server.host to {ip} (docs/fleet.md), or give --url",
        )
    return http_url


def _check_free(folder: Path) -> None:
    """Check that this node is in no fleet."""
    try:
        membership = cluster.read_membership(folder)
    except Refused:
        return
    raise Refused(
        f"this node is in the fleet at {membership.ray_address} as {membership.name}",
        "leave the fleet first: `gpupool fleet leave`",
    )


@contextlib.contextmanager
def _controller(socket_path: Path) -> Iterator[Any]:
    """Connect; yield a function for calls of the controller."""
    folder, secret = _daemons(socket_path)
    with cluster.connected(secret, cluster.read_membership(folder)) as ray:
        yield lambda method, *arguments: _ask(ray, method, *arguments)


def _ask(ray: Any, method: str, *arguments: object) -> Any:
    try:
        controller = ray.get_actor(cluster.CONTROLLER, cluster.NAMESPACE)
    except ValueError as error:
        raise Failed("the fleet has no controller", "is its first node up?") from error
    return _get(ray, getattr(controller, method).remote(*arguments))


def _get(ray: Any, reference: Any) -> Any:
    """Return an answer of an actor.

    Raises GpupoolError: the error of the actor, or the actor does not answer.
    """
    try:
        return ray.get(reference, timeout=_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GpupoolError):
            raise error.cause from None
        raise Failed(f"the fleet failed: {error.cause!r}") from error
    except ray.exceptions.RayError as error:
        raise Failed(f"the fleet does not answer: {str(error).splitlines()[0]}") from error
