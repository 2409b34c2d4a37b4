"""A fleet on Ray on one machine, for benchmarks: each node is a daemon on a loopback address."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.errors import GpupoolError
from gpupoold.fleet import cluster, operations
from gpupoold.fleet.cluster import FleetSpec

_RAY_PORT, _HTTP_PORT = 6395, 8195
_PLACED_S = 600.0


class Fleet:
    """The daemons by node, and the entrance's address."""

    def __init__(self, daemons: Mapping[str, PrivateDaemon]) -> None:
        self.daemons = dict(daemons)
        self.alive = list(daemons)
        self.head = self.alive[0]
        self.url = f"http://{self.address(self.head)}:{_HTTP_PORT}"

    def address(self, node: str) -> str:
        return f"127.0.0.{2 + list(self.daemons).index(node)}"

    def up(self, num_replicas: int) -> None:
        ip = self.address(self.head)
        entrance = operations.EntranceOptions(
            host=ip, port=_HTTP_PORT, num_replicas=num_replicas, is_everywhere=False
        )
        operations.up(self._socket_path, self.head, ip, "", _RAY_PORT, entrance)
        secret = operations.secret_of(self._socket_path)
        for node, daemon in self.daemons.items():
            if node != self.head:
                address = f"{ip}:{_RAY_PORT}"
                own = self.address(node)
                operations.join(daemon.socket_path, address, secret, node, own, "", owns_ray=True)

    def down(self) -> None:
        for node in reversed(self.alive):
            with contextlib.suppress(GpupoolError):
                operations.leave(self.daemons[node].socket_path)
        for node in self.daemons:  # of killed ones too
            cluster.stop_ray(self.address(node))

    def place(self, specs: Sequence[FleetSpec]) -> None:
        """Add models and wait until all have their nodes."""
        for spec in specs:
            operations.add_model(self._socket_path, spec)
        wanted = {spec.name: spec.least_replicas for spec in specs}
        if self.settled_after_s(wanted, _PLACED_S) is None:
            raise TimeoutError("the models are not placed")

    def settled_after_s(self, wanted: Mapping[str, int], timeout_s: float) -> float | None:
        """Wait until all living nodes report and each model is on so many of them.

        Returns the seconds, None after a time-out.
        """
        began_s = time.monotonic()
        with operations.watching(self._socket_path) as state:
            while (passed_s := time.monotonic() - began_s) < timeout_s:
                nodes = [one for one in state().table.nodes if not one.is_lost]
                if len(nodes) == len(self.alive) and all(
                    sum(node.serves(name) for node in nodes)
                    == sum(node.model(name) is not None for node in nodes)
                    == number
                    for name, number in wanted.items()
                ):
                    return passed_s
                time.sleep(0.5)
        return None

    def is_lost(self, node: str) -> bool:
        """Return whether the fleet believes a node lost."""
        nodes = operations.state(self._socket_path).table.nodes
        return any(one.name == node and one.is_lost for one in nodes)

    def serving(self, model: str) -> list[str]:
        """Return the living nodes with a model."""

        def names() -> Iterator[str]:
            for node in self.alive:
                with contextlib.suppress(GpupoolError), self.daemons[node].client() as client:
                    if any(one.name == model for one in client.models()):
                        yield node

        return list(names())

    def counted(self, *, without: str = "") -> tuple[int, int]:
        """Return the tokens of all living daemons, and those in time; of all models but one."""
        tokens = in_time = 0
        for node in self.alive:
            with self.daemons[node].client() as client:
                for model in client.ps().models:
                    if model.name != without:
                        tokens += model.tokens
                        in_time += model.tokens_in_time
        return tokens, in_time

    def kill(self, node: str) -> None:
        """Kill all processes of a daemon, as when a machine dies."""
        self.alive.remove(node)
        process = psutil.Process(self.daemons[node].process.pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    @contextlib.contextmanager
    def parted(self, node: str) -> Iterator[None]:
        """Let a node's agent answer nobody inside the context, as in a divided network."""
        raylet = next(
            one for one in psutil.process_iter() if _is_raylet_of(one, self.address(node))
        )
        agents = [one for one in raylet.children() if "AgentActor" in " ".join(one.cmdline())]
        for one in agents:
            one.suspend()
        try:
            yield
        finally:
            for one in agents:
                one.resume()

    @property
    def _socket_path(self) -> Path:
        return self.daemons[self.head].socket_path


def _is_raylet_of(process: psutil.Process, ip: str) -> bool:
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return bool(line) and line[0].endswith("raylet") and f"--node_ip_address={ip}" in line
