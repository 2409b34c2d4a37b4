"""``make fuzz``: the whole HTTP surface against bad requests, for longer than the tests can.

Runs two daemons: one with simulated devices, one with real engines on an emulated device. Each
daemon gets malformed requests, requests near the limits while another client streams, and requests
that schemathesis generates from the daemon's OpenAPI descriptions. Afterwards the daemon must have
the same processes, no live request, no more open files, and serve as before; no event loop may have
been late by more than a second, and no stream of the other client may have paused for 100 ms longer
than beside as many ordinary requests of the same sizes. Writes ``build/fuzz.json``; exit code 1 if
a condition fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.fuzz import Outcome, send_malformed_requests
from benchmarks.generated import generated
from benchmarks.malformed_requests import MAX_TOKENS, malformed_requests
from benchmarks.near_limits import near_limits
from benchmarks.noise import (
    MAX_BODY_BYTES,
    MORE_PAUSE_S,
    NEAR_AT_ONCE,
    NEAR_PATIENCE_S,
    beside_a_neighbour,
    late_loops,
)
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import processes
from benchmarks.report import Figure, at_least, at_most, finish
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.units import format_bytes

MODELS = ("one", "two")
_SIM_CONFIG = 'devices = ["sim:2xA100"]\n'
_SETTLE_S = 20.0
# Caches fill during the first thousands of requests; growth after the warm-up is a leak.
_MAX_GROWTH_BYTES = 100 << 20
_WARM_UP = 3_000
_NUM_LISTS = 32


def main() -> int:
    """Run both; see the module."""
    arguments = _parse()
    os.environ["HF_HUB_OFFLINE"] = "1"  # synthetic names of models must not be looked up
    with tempfile.TemporaryDirectory(prefix="gpupool-fuzz-") as name:
        folder = Path(name)
        dummy = make_dummy_checkpoint(folder, "Qwen2.5-7B")
        tiny = make_checkpoints(folder, ["llama", "qwen3"], 10_000_000)
        room = emulated_config(int(2.5 * weight_bytes(tiny[0])) + (64 << 20), 2)
        runs = {
            "simulated": _fuzz(arguments, _SIM_CONFIG, [dummy, dummy], {}),
            "emulated": _fuzz(arguments, room, tiny, {"dtype": "float32"}),
        }
    code = finish(arguments.out, dict(make_figures(runs)), **runs)
    for kind, run in runs.items():
        for text in (*run["harm"], *run["wrong"][:20]):
            print(f"{kind}: {text}")
    return code


def make_figures(runs: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The figures by name, each beside its limit."""
    for kind, run in runs.items():
        for name in ("mutated", "public", "admin"):
            yield f"{kind}_{name}_requests", at_least(run[name]["requests"], 1)
        yield f"{kind}_wrong_answers", at_most(len(run["wrong"]), 0)
        yield f"{kind}_harm", at_most(len(run["harm"]), 0)
        neighbour = run["neighbour"]
        most_s = neighbour["pause_beside_ordinary_s"] + MORE_PAUSE_S
        yield f"{kind}_longest_pause_s", at_most(neighbour["pause_s"], most_s)


def _fuzz(
    arguments: argparse.Namespace, config: str, checkpoints: list[Path], options: dict[str, Any]
) -> dict[str, Any]:
    with private_daemon(config) as daemon:
        for name, checkpoint in zip(MODELS, checkpoints, strict=True):
            daemon.add_model(name, checkpoint, max_model_len=1024, **options)
        seed, port = arguments.seed, int(daemon.http_url.rpartition(":")[2])
        first = _answer(daemon)
        warm_up = malformed_requests(seed + 1, min(_WARM_UP, arguments.requests), MODELS)
        asyncio.run(send_malformed_requests(port, warm_up))
        # Fills the workers' caches of grammars, which are the largest.
        filling = near_limits(seed + 1, arguments.near, MODELS, MAX_BODY_BYTES)
        asyncio.run(send_malformed_requests(port, filling, NEAR_AT_ONCE, NEAR_PATIENCE_S))
        for _ in range(_NUM_LISTS):  # each frontend opens the database's log at its first reading
            httpx.get(f"{daemon.http_url}/v1/batches").raise_for_status()
        before = _processes(daemon)
        mutated = asyncio.run(
            send_malformed_requests(port, malformed_requests(seed, arguments.requests, MODELS))
        )
        harm = list(_harm(daemon, before))
        near, felt = beside_a_neighbour(daemon, arguments.near, seed, MODELS)
        harm += [*_harm(daemon, before), *felt.harm(has_same_answers=bool(options))]
        described = httpx.get(f"{daemon.http_url}/openapi.json", timeout=60).json()
        made = list(generated(described, arguments.examples, seed, _adjust_public))
        public = asyncio.run(send_malformed_requests(port, made))
        transport = httpx.HTTPTransport(uds=str(daemon.socket_path))
        with httpx.Client(transport=transport, base_url="http://gpupoold") as http:
            described = http.get("/openapi.json").json()
        # Benchmarks occupy a device for as long as the request asks.
        described["paths"] = {
            path: one for path, one in described["paths"].items() if not path.startswith("/bench/")
        }
        made = list(generated(described, arguments.examples, seed, _adjust_admin))
        admin = asyncio.run(send_malformed_requests(daemon.socket_path, made))
        harm += _harm(daemon, before)
        # Tokens of simulated devices depend on the request's id, so the answers differ.
        if options and _answer(daemon) != first:
            harm.append("it answers otherwise than before")
        harm += _late_loops(daemon)
    outcomes = {"mutated": mutated, "near_limits": near, "public": public, "admin": admin}
    wrong = [text for outcome in outcomes.values() for text in _told(outcome)]
    rows = {name: one.row() for name, one in outcomes.items()}
    return rows | {"neighbour": felt.row(), "wrong": wrong, "harm": harm}


def _adjust_public(case: Any) -> None:
    """Most are to reach a model, and none is to ask for a long answer."""
    if isinstance(case.body, dict):
        case.body["model"] = MODELS[0]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], MAX_TOKENS)


def _adjust_admin(case: Any) -> None:
    """No answers without an end, and no device is drained or given a role."""
    case.query.pop("follow", None)
    if "number" in case.path_parameters:
        case.path_parameters["number"] = 99


def _answer(daemon: PrivateDaemon) -> str:
    """A greedy answer's text.

    Raises:
        httpx.HTTPError: the daemon does not serve.
    """
    body = {"model": MODELS[0], "prompt": "hello", "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{daemon.http_url}/v1/completions", json=body, timeout=60)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


def _processes(daemon: PrivateDaemon) -> dict[int, tuple[int, int]]:
    """Open files and resident bytes of the daemon's processes."""
    return {one.pid: (one.num_fds(), one.memory_info().rss) for one in processes(daemon)}


def _harm(daemon: PrivateDaemon, before: dict[int, tuple[int, int]]) -> Iterator[str]:
    """What is not as it was, when it has had time to settle."""
    deadline_s = time.monotonic() + _SETTLE_S
    while (problems := list(_open_things(daemon, before))) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    yield from problems
    after = _processes(daemon)
    if after.keys() != before.keys():
        yield f"processes were {sorted(before)} and are {sorted(after)}"
    for pid, (_, rss_bytes) in after.items():
        grown = rss_bytes - before.get(pid, (0, rss_bytes))[1]
        if grown > _MAX_GROWTH_BYTES:
            yield f"process {pid} has grown by {format_bytes(grown)}"


def _open_things(daemon: PrivateDaemon, before: dict[int, tuple[int, int]]) -> Iterator[str]:
    with daemon.client() as client:
        if live := client.ps().requests:
            yield f"{len(live)} requests are still live"
    for pid, (num_files, _) in _processes(daemon).items():
        if num_files > before.get(pid, (num_files, 0))[0]:
            yield f"process {pid} had {before[pid][0]} files open and has {num_files}"


def _late_loops(daemon: PrivateDaemon) -> Iterator[str]:
    text = httpx.get(f"{daemon.http_url}/metrics", timeout=60).raise_for_status().text
    for process, number in late_loops(text).items():
        if number:
            yield f"the event loop of {process} was late by more than 1 s {number} times"


def _told(outcome: Outcome) -> list[str]:
    return [
        f"{status}: {malformed_request.data[:300]!r}: {text[-300:]!r}"
        for malformed_request, status, text in outcome.wrong
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz.json"))
    parser.add_argument("--requests", type=int, default=10_000, help="mutated, to each daemon")
    parser.add_argument("--near", type=int, default=600, help="near the limits, to each daemon")
    parser.add_argument("--examples", type=int, default=6, help="generated, per operation and kind")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
