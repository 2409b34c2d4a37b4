"""A fleet on Ray under load, beside the simulator; a node that dies; the entrance's own cost.

``make bench-fleet``. Starts daemons with simulated devices on one machine, each on a loopback
address, as nodes of a fleet with an entrance on Ray Serve. Writes ``build/bench-fleet.json``; exit
code 1 when a figure was missed.

1. Poisson arrivals with ShareGPT lengths through the entrance; the attainment that the daemons
   counted, beside the simulator's on a box with the devices of all nodes.
2. Open streams of a model on two nodes, one of which is killed: streams without their last token,
   and the time until the streams of the dead node go on.
3. Requests with one token, and streams, through the entrance and beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.report import at_least, at_most, finish
from benchmarks.sim_devices import CappedLengths, send_all, sim_config, simulated_on
from benchmarks.stream_client import stream_apart
from gpupool_cli.private_daemon import PrivateDaemon, private_daemon
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.domain import Targets
from gpupoold.errors import GpupoolError
from gpupoold.fleet import cluster, operations
from gpupoold.fleet.nodes import FleetSpec
from gpupoold.sim.boxes import DEFAULT_SHAPES, box_models, parse_box
from gpupoold.sim.workloads import equal_rates, poisson_workload
from gpupoold.stats.percentile import percentile

STREAMED = "streamed"
_RAY_PORT, _HTTP_PORT = 6395, 8195
_MAX_MODEL_LEN = 8192
_PLACED_S = 600.0
_NUM_PROBES = 200
_STREAM_TOKENS = 600
_DISCARDED_S = 3.0


@dataclass(slots=True)
class Stream:
    """A stream as its client sees it: the times of its chunks and the tokens in the end."""

    node: str = ""
    chunks_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    is_whole: bool = False

    def resumed_after_s(self, at_s: float) -> float | None:
        """Return the seconds from a moment to the next chunk, None without one."""
        return next((one - at_s for one in self.chunks_s if one > at_s), None)


class Fleet:
    """The daemons by node, and the entrance's address."""

    def __init__(self, daemons: Mapping[str, PrivateDaemon]) -> None:
        self.daemons = dict(daemons)
        self.head = next(iter(daemons))
        self.url = f"http://{self.address(self.head)}:{_HTTP_PORT}"

    def address(self, node: str) -> str:
        return f"127.0.0.{2 + list(self.daemons).index(node)}"

    def up(self, num_replicas: int) -> None:
        ip = self.address(self.head)
        entrance = operations.EntranceOptions(
            host=ip, port=_HTTP_PORT, num_replicas=num_replicas, is_everywhere=False
        )
        socket_path = self.daemons[self.head].socket_path
        operations.up(socket_path, self.head, ip, "", _RAY_PORT, entrance)
        secret = operations.secret_of(socket_path)
        for node, daemon in self.daemons.items():
            if node != self.head:
                address = f"{ip}:{_RAY_PORT}"
                own = self.address(node)
                operations.join(daemon.socket_path, address, secret, node, own, "", owns_ray=True)

    def down(self) -> None:
        for daemon in reversed(self.daemons.values()):
            with contextlib.suppress(GpupoolError):
                operations.leave(daemon.socket_path)
        for node in self.daemons:  # of the killed one too
            cluster.stop_ray(self.address(node))

    def place(self, specs: list[FleetSpec]) -> None:
        """Add models and wait until all have their nodes."""
        socket_path = self.daemons[self.head].socket_path
        for spec in specs:
            operations.add_model(socket_path, spec)
        deadline_s = time.monotonic() + _PLACED_S
        while time.monotonic() < deadline_s:
            nodes = operations.state(socket_path).table.nodes
            having = {spec.name: sum(node.serves(spec.name) for node in nodes) for spec in specs}
            if all(having[spec.name] >= spec.least_replicas for spec in specs):
                return
            time.sleep(1.0)
        raise TimeoutError(f"not placed: {having}")

    def counted(self) -> tuple[int, int]:
        """Return the tokens of all daemons, and those in time."""
        tokens = in_time = 0
        for daemon in self.daemons.values():
            with daemon.client() as client:
                for model in client.ps().models:
                    tokens += model.tokens
                    in_time += model.tokens_in_time
        return tokens, in_time

    def kill(self, node: str) -> None:
        """As when a machine dies."""
        process = psutil.Process(self.daemons[node].process.pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    args = _parse()
    each = parse_box(args.devices)
    box = parse_box(f"{args.nodes * each.num_devices}x{each.gpu}")
    targets = Targets(args.ttft, args.tbt)
    models = box_models(box, args.models, targets, DEFAULT_SHAPES)
    requests = poisson_workload(
        equal_rates(list(models), args.rps / args.models),
        args.duration,
        CappedLengths(2048, args.max_output),
        args.seed,
    )
    with tempfile.TemporaryDirectory(prefix="gpupool-fleet-") as name, contextlib.ExitStack() as on:
        folder = Path(name)
        config = sim_config(each)
        fleet = Fleet(
            {
                f"node{number}": on.enter_context(private_daemon(config, folder / str(number)))
                for number in range(args.nodes)
            }
        )
        on.callback(fleet.down)
        fleet.up(args.replicas)
        paths = [make_dummy_checkpoint(folder, shape) for shape in DEFAULT_SHAPES]
        fleet.place([_spec(one, paths[n % len(paths)], args) for n, one in enumerate(models)])
        fleet.place([_spec(STREAMED, paths[0], args, 2)])
        before = fleet.counted()
        sent = asyncio.run(send_all(fleet.url, requests, args.seed, 0.2))
        tokens, in_time = (now - then for now, then in zip(fleet.counted(), before, strict=True))
        attainment = in_time / max(1, tokens)
        simulated = simulated_on(models, box, requests, "gpupool")["attainment"]
        added = asyncio.run(_added_latency(fleet))
        rates = _rates(fleet)
        death = asyncio.run(_death(fleet, args.streams))
    figures = {
        "failed_requests": at_most(sent.errors.total(), 0),
        "attainment_below_simulated": at_most(simulated - attainment, 0.02),
        "lost_streams": at_most(death["lost"], 0),
        "resumed_p99_s": at_most(death["resumed_p99_s"], 2.0),
        "streams_of_the_dead_node": at_least(death["of_dead_node"], 1),
    }
    parts = {
        "load": {"attainment": attainment, "simulated": simulated, "tokens": tokens}
        | {"requests": len(requests), "errors": dict(sent.errors.most_common(5))},
        "added_latency": added,
        "rates": rates,
        "death": death,
        "arguments": {key: str(value) for key, value in vars(args).items()},
    }
    return finish(args.out, figures, **parts)


def _spec(name: str, path: Path, args: argparse.Namespace, least_replicas: int = 1) -> FleetSpec:
    request = AddModelRequest(
        name=name,
        source=str(path),
        max_model_len=_MAX_MODEL_LEN,
        ttft_s=args.ttft,
        tbt_s=args.tbt,
    )
    return FleetSpec(request, least_replicas)


async def _added_latency(fleet: Fleet) -> dict[str, float | None]:
    """Times of requests with one token through the entrance and beside it, in turn."""
    times_s: dict[str, list[float]] = {"entrance": [], "direct": []}
    direct = _serving(fleet)[0]
    urls = {"entrance": fleet.url, "direct": fleet.daemons[direct].http_url}
    body = {"model": STREAMED, "prompt": [5] * 8, "max_tokens": 1}
    async with aiohttp.ClientSession() as session:
        for _ in range(_NUM_PROBES):
            for name, url in urls.items():
                began_s = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
                times_s[name].append(time.monotonic() - began_s)
    found: dict[str, float | None] = {}
    for name, each in times_s.items():
        found |= {f"{name}_p{p}_s": percentile(each, p / 100) for p in (50, 99)}
    return found


def _rates(fleet: Fleet) -> dict[str, float]:
    """Tokens per second of 64 streams through the entrance and beside it."""
    direct = fleet.daemons[_serving(fleet)[0]].http_url
    found = {}
    for name, url in (("entrance", fleet.url), ("direct", direct)):
        host, _, port = url.removeprefix("http://").rpartition(":")
        streamed = stream_apart(int(port), "/v1/completions", STREAMED, 64, 200, host)
        found[f"{name}_tokens_per_s"] = streamed.tokens / streamed.wall_s
    return found


async def _death(fleet: Fleet, num_streams: int) -> dict[str, Any]:
    """Kill one of the nodes with open streams."""
    doomed = next(one for one in _serving(fleet) if one != fleet.head)
    streams = [Stream() for _ in range(num_streams)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        reading = [
            asyncio.create_task(_read(session, fleet.url, number, one))
            for number, one in enumerate(streams)
        ]
        while not all(one.chunks_s for one in streams):
            await asyncio.sleep(0.1)
        await asyncio.sleep(_DISCARDED_S)
        killed_s = time.monotonic()
        await asyncio.to_thread(fleet.kill, doomed)
        await asyncio.gather(*reading, return_exceptions=True)
    of_dead = [one for one in streams if one.node == doomed]
    resumed_s = [one.resumed_after_s(killed_s + 0.2) or 300.0 for one in of_dead]
    lost = [one for one in streams if not one.is_whole or one.num_tokens != _STREAM_TOKENS]
    return {
        "streams": num_streams,
        "of_dead_node": len(of_dead),
        "lost": len(lost),
        "resumed_p50_s": percentile(resumed_s, 0.5),
        "resumed_p99_s": percentile(resumed_s, 0.99) or 0.0,
    }


async def _read(session: aiohttp.ClientSession, url: str, number: int, stream: Stream) -> None:
    # A conversation of its own, so that the streams are on both nodes.
    prompt = [300 + number] * 8
    body = {"model": STREAMED, "prompt": prompt, "max_tokens": _STREAM_TOKENS, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        stream.node = answer.headers.get("x-gpupool-node", "")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stream.chunks_s.append(time.monotonic())
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    stream.num_tokens = usage["completion_tokens"]
            elif line.startswith(b"data: [DONE]"):
                stream.is_whole = True


def _serving(fleet: Fleet) -> list[str]:
    def names() -> Iterator[str]:
        for node, daemon in fleet.daemons.items():
            with contextlib.suppress(GpupoolError), daemon.client() as client:
                if any(one.name == STREAMED for one in client.models()):
                    yield node

    return list(names())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--devices", default="8xH800", help="of each node")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--rps", type=float, default=40.0, help="of all models together")
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of arrivals")
    parser.add_argument("--max-output", type=int, default=256, help="cap on answer tokens")
    parser.add_argument("--streams", type=int, default=500, help="open when a node is killed")
    parser.add_argument("--replicas", type=int, default=2, help="processes of the entrance")
    parser.add_argument("--ttft", type=float, default=10.0)
    parser.add_argument("--tbt", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench-fleet.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
