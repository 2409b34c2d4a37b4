"""The Ray cluster under a fleet: starting, joining, connecting, leaving.

Ray requires the fleet's secret as a token from every process. The environment variables must be set
before the import of Ray, so Ray is imported late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gpupoold.api.schemas_access import FleetModel, FleetReport
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.domain import ModelState, Priority
from gpupoold.errors import Failed, Refused
from gpupoold.scheduling.pressure import ModelDemand

NAMESPACE = "gpupool"
CONTROLLER = "controller"
NODE_FILE = "fleet-node.json"
MISSING = "the fleet needs Ray: pip install 'gpupool[fleet]'"
_START_TIMEOUT_S = 90.0
# Ray keeps objects in shared memory; a fleet sends small reports only.
_OBJECT_STORE_BYTES = 80_000_000

# Spreads models without requests over the nodes.
LEAST_LOAD = 0.01


class EntranceOptions(BaseModel):
    """Address and number of processes of the entrance."""

    host: str
    port: int
    num_replicas: int
    is_everywhere: bool


class NodeMembership(BaseModel):
    """A node's membership in a fleet, stored in the daemon's state folder."""

    name: str
    ip: str
    ray_address: str
    is_head: bool
    owns_ray: bool
    """False in an existing Ray cluster."""
    url: str = ""
    """The daemon's address for the entrance, empty for the daemon's own."""
    entrance: EntranceOptions | None = None
    """The entrance that this node starts as the head."""

    @property
    def head_port(self) -> int | None:
        """The port of Ray on the head, None on further nodes."""
        return int(self.ray_address.rpartition(":")[2]) if self.is_head else None


def agent_name(node: str) -> str:
    """Return the name of a node's agent among Ray's actors."""
    return f"agent:{node}"


def read_membership(folder: Path) -> NodeMembership:
    """Return the membership of this node.

    Raises:
        Refused: the node is in no fleet.
        Failed: the file cannot be read.
    """
    path = folder / NODE_FILE
    try:
        return NodeMembership.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        hint = "start one with `gpupool fleet up`, or join one with `gpupool fleet join`"
        raise Refused("this node is in no fleet", hint) from None
    except (OSError, ValidationError) as error:
        raise Failed(f"{path} cannot be read: {error}") from error


def write_membership(folder: Path, membership: NodeMembership | None) -> None:
    """Store the membership of this node; None removes the file.

    Raises Failed: the file cannot be written.
    """
    path = folder / NODE_FILE
    try:
        if membership is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(membership.model_dump_json(indent=1))
    except OSError as error:
        raise Failed(f"{path} cannot be written: {error}") from error


def ray_environment(secret: str) -> dict[str, str]:
    """Return the variables of all processes of the cluster."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secret,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def start_ray(secret: str, node: NodeMembership) -> None:
    """Start Ray on this node, unless others have started Ray.

    Raises Failed: Ray did not start, for example because the port is taken.
    """
    if not node.owns_ray:
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", node.ip]
    command += ["--num-cpus", "0", "--num-gpus", "0", "--disable-usage-stats"]
    command += ["--object-store-memory", str(_OBJECT_STORE_BYTES)]
    command += ["--include-log-monitor", "false"]
    if node.head_port is None:
        command += ["--address", node.ray_address]
    else:
        folder = _folder(node.head_port)
        _make_private(folder)
        command += ["--head", "--port", str(node.head_port), "--include-dashboard", "false"]
        command += ["--temp-dir", str(folder)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | ray_environment(secret),
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"Ray did not start within {_START_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Failed("Ray did not start: " + " / ".join(lines[-4:]))


def _folder(head_port: int) -> Path:
    return Path(f"/tmp/gpupool-ray-{os.getuid()}-{head_port}")


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise Failed(f"{folder} belongs to another user", "remove the folder, or use another port")
    folder.chmod(0o700)


@contextlib.contextmanager
def connected(secret: str, membership: NodeMembership) -> Iterator[Any]:
    """Connect this process to the cluster; yield the module ``ray``.

    Raises Failed: Ray is not installed, or the cluster does not answer.
    """
    os.environ.update(ray_environment(secret))
    try:
        import ray
    except ImportError as error:
        raise Failed(MISSING) from error
    try:
        ray.init(
            address=membership.ray_address,
            namespace=NAMESPACE,
            _node_ip_address=membership.ip,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Failed(
            f"the fleet at {membership.ray_address} does not answer: {text[0] if text else error}",
            "is its first node up?",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def end_ray(node: NodeMembership) -> None:
    """End the Ray processes of a node that has started Ray."""
    if node.owns_ray:
        stop_ray(node.ip, node.head_port)


def stop_ray(ip: str, head_port: int | None = None) -> int:
    """End the Ray processes of the node with this address; return the number of processes.

    With ``head_port`` the node is the head, and all processes of the cluster on this machine end.
    ``ray stop`` would end the processes of all clusters.
    """
    import psutil

    marks = [f"--node_ip_address={ip}", f"--node-ip-address={ip}"]
    if head_port is not None:
        marks += [f"{_folder(head_port)}/", f"={ip}:{head_port}"]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        line = " ".join(words)
        is_ray = "/ray/" in line or "ray::" in line or " ray." in line
        if is_ray and any(mark in line for mark in marks):
            found += [process, *process.children(recursive=True)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(found, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon of the fleet with its latest report.

    ``url`` is the daemon's address for the entrance. ``seen_s`` is the controller's time of the
    report. ``ongoing`` has the models of orders under way, ``failed`` the models of failed orders,
    ``retiring`` the models whose requests go to other nodes.
    """

    name: str
    url: str
    report: FleetReport
    seen_s: float
    is_draining: bool = False
    is_lost: bool = False
    ongoing: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    retiring: frozenset[str] = frozenset()

    @property
    def takes_requests(self) -> bool:
        return not self.is_lost and not self.is_draining and self.report.is_ready

    @property
    def num_devices(self) -> int:
        return len(self.report.device_bytes)

    def model(self, name: str) -> FleetModel | None:
        return next((model for model in self.report.models if model.name == name), None)

    def serves(self, name: str) -> bool:
        """Return whether the daemon answers requests of the model."""
        model = self.model(name)
        return model is not None and model.state == ModelState.READY


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A model for placement on at least ``least_replicas`` nodes."""

    request: AddModelRequest
    least_replicas: int = 1

    @property
    def name(self) -> str:
        return self.request.name


def demand_of(spec: FleetSpec, found: Collection[FleetModel]) -> ModelDemand:
    """Return the model's work on one device, summed over the reports of all nodes."""
    window_s = max((model.window_s for model in found), default=spec.request.ttft_s)
    idle_share = 1.0
    for model in found:
        idle_share *= 1.0 - model.busy_share
    return ModelDemand(
        spec.name,
        max(LEAST_LOAD, sum(model.load for model in found)),
        max(LEAST_LOAD, 1.0 - idle_share),
        window_s,
        max((model.weights_bytes for model in found), default=0),
        sum(model.kv_bytes for model in found),
    )


def shared(demand: ModelDemand, num: int) -> ModelDemand:
    """Return the work divided by ``num`` replicas or devices."""
    return replace(
        demand,
        load=demand.load / num,
        busy_share=demand.busy_share / num,
        kv_bytes=demand.kv_bytes / num,
    )


@dataclass(frozen=True, slots=True)
class FleetTable:
    """The controller's knowledge for entrances; ``version`` grows with each round."""

    version: int = 0
    secret: str = ""
    nodes: tuple[Node, ...] = field(default=())
    placed: Mapping[str, str] = field(default_factory=dict)
    """Names of the models placed by the fleet by names and aliases, also without a node so far."""
    priorities: Mapping[str, Priority] = field(default_factory=dict)
    """Priorities of the fleet's API keys by id, without keys of normal priority."""

    def names(self) -> dict[str, str]:
        return dict(self.placed) | {
            name: model.name
            for node in self.nodes
            for model in node.report.models
            for name in model.names
        }
