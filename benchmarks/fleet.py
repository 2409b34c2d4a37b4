"""A fleet on Ray under load, beside the simulator; faults; the entrance's own cost.

``make bench-fleet``. Starts daemons with simulated devices on one machine, each on a loopback
address, as nodes of a fleet with an entrance on Ray Serve. Writes ``build/bench-fleet.json``; exit
code 1 when a figure was missed.

1. Poisson arrivals with ShareGPT lengths through the entrance; the attainment that the daemons
   counted, beside the simulator's on a box with the devices of all nodes.
2. Requests with one token, and streams, through the entrance and beside it.
3. A node's agent that nobody reaches for a minute, under load: failed requests, and whether each
   model is on as many nodes as before in the end.
4. A node that dies under load: failed requests, and the attainment afterwards.
5. Open streams of a model on two nodes, one of which is killed: streams without their last token,
   and the time until the streams of the dead node go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet_box import Fleet
from benchmarks.fleet_faults import PARTED_S, death_under_load, death_with_streams, partition
from benchmarks.private_daemon import private_daemon
from benchmarks.report import Figure, at_least, at_most, finish
from benchmarks.sim_devices import CappedLengths, send_all, sim_config, simulated_on
from benchmarks.stream_client import stream_apart
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.domain import Targets
from gpupoold.fleet.cluster import FleetSpec
from gpupoold.sim.boxes import DEFAULT_SHAPES, Box, SimModel, box_models, parse_box
from gpupoold.sim.workloads import SimRequest, equal_rates, poisson_workload
from gpupoold.stats.histogram import percentile

STREAMED = "streamed"
_MAX_MODEL_LEN = 8192
_NUM_PROBES = 200
# Load after the end of the partition, and the load around a death.
_FURTHER_S, _DEATH_S = 30.0, 90.0


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    args = _parse()
    each = parse_box(args.devices)
    box = parse_box(f"{args.nodes * each.num_devices}x{each.gpu}")
    models = box_models(box, args.models, Targets(args.ttft, args.tbt), args.shapes)
    with _fleet(args, each) as (fleet, folder):
        paths = [make_dummy_checkpoint(folder, shape) for shape in args.shapes]
        fleet.place([_spec(one, paths[n % len(paths)], args) for n, one in enumerate(models)])
        fleet.place([_spec(STREAMED, paths[0], args, 2)])
        parts: dict[str, Any] = {"load": _load(fleet, args, models, box)}
        parts["added_latency"] = asyncio.run(_added_latency(fleet))
        parts["rates"] = _rates(fleet)
        light = args.rps / 2
        wanted = dict.fromkeys(models, 1) | {STREAMED: 2}
        during = _requests(models, args, light, PARTED_S + _FURTHER_S)
        parts["partition"] = asyncio.run(partition(fleet, fleet.alive[1], during, wanted))
        during = _requests(models, args, light, _DEATH_S)
        dying = fleet.alive[-1]
        parts["death_under_load"] = asyncio.run(
            death_under_load(fleet, dying, during, STREAMED, args.ttft)
        )
        fleet.settled_after_s(wanted, 120.0)
        parts["death"] = asyncio.run(death_with_streams(fleet, STREAMED, args.streams))
    parts["arguments"] = {key: str(value) for key, value in vars(args).items()}
    return finish(args.out, _figures(parts), **parts)


@contextlib.contextmanager
def _fleet(args: argparse.Namespace, each: Box) -> Iterator[tuple[Fleet, Path]]:
    with tempfile.TemporaryDirectory(prefix="gpupool-fleet-") as name, contextlib.ExitStack() as on:
        folder = Path(name)
        daemons = {
            f"node{number}": on.enter_context(
                private_daemon(sim_config(each), folder / str(number))
            )
            for number in range(args.nodes)
        }
        fleet = Fleet(daemons)
        on.callback(fleet.down)
        fleet.up(args.replicas)
        yield fleet, folder


def _load(
    fleet: Fleet, args: argparse.Namespace, models: Mapping[str, SimModel], box: Box
) -> dict[str, Any]:
    """The whole load, and the attainment beside the simulator's."""
    requests = _requests(models, args, args.rps, args.duration)
    before, began_s = fleet.counted(), time.monotonic()
    sent = asyncio.run(send_all(fleet.url, requests, args.seed, 0.2))
    wall_s = time.monotonic() - began_s
    tokens, in_time = (now - then for now, then in zip(fleet.counted(), before, strict=True))
    return {
        "attainment": in_time / max(1, tokens),
        "simulated": simulated_on(models, box, requests, "gpupool")["attainment"],
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "requests": len(requests),
        "failed": sent.errors.total(),
        "errors": dict(sent.errors.most_common(5)),
    }


def _requests(
    models: Mapping[str, SimModel], args: argparse.Namespace, rps: float, duration_s: float
) -> Sequence[SimRequest]:
    rates = equal_rates(list(models), rps / len(models))
    lengths = CappedLengths(2048, args.max_output)
    return poisson_workload(rates, duration_s, lengths, args.seed)


def _figures(parts: Mapping[str, Any]) -> dict[str, Figure]:
    load, death, killed = parts["load"], parts["death"], parts["death_under_load"]
    parted = parts["partition"]
    return {
        "failed_requests": at_most(load["failed"], 0),
        "attainment_below_simulated": at_most(load["simulated"] - load["attainment"], 0.02),
        "failed_requests_partition": at_most(parted["errors"], 0),
        "models_single_after_partition": at_least(
            int(parted["is_settled"] and parted["was_lost"]), 1
        ),
        "failed_requests_death": at_most(killed["errors"], 0),
        "attainment_back_s": at_most(killed["attainment_back_s"], 30.0),
        "first_tokens_back_s": at_most(killed["first_tokens_back_s"], 30.0),
        "lost_streams": at_most(death["lost"], 0),
        "resumed_p99_s": at_most(death["resumed_p99_s"], 2.0),
        "streams_of_the_dead_node": at_least(death["of_dead_node"], 1),
    }


def _spec(name: str, path: Path, args: argparse.Namespace, least_replicas: int = 1) -> FleetSpec:
    request = AddModelRequest(
        name=name, source=str(path), max_model_len=_MAX_MODEL_LEN, ttft_s=args.ttft, tbt_s=args.tbt
    )
    return FleetSpec(request, least_replicas)


async def _added_latency(fleet: Fleet) -> dict[str, float | None]:
    """Times of requests with one token through the entrance and beside it, in turn."""
    times_s: dict[str, list[float]] = {"entrance": [], "direct": []}
    direct = fleet.serving(STREAMED)[0]
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
    direct = fleet.daemons[fleet.serving(STREAMED)[0]].http_url
    found = {}
    for name, url in (("entrance", fleet.url), ("direct", direct)):
        host, _, port = url.removeprefix("http://").rpartition(":")
        streamed = stream_apart(int(port), "/v1/completions", STREAMED, 64, 200, host)
        found[f"{name}_tokens_per_s"] = streamed.tokens / streamed.wall_s
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--devices", default="8xH800", help="of each node")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--shapes", nargs="+", default=DEFAULT_SHAPES, help="in turn")
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
