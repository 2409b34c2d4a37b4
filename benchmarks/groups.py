"""Groups of GPUs under switches, migrations and kills: ``make bench-groups``.

    python -m benchmarks.groups [--gpus N]

Two groups of emulated GPUs serve four models, each group with room for one and a half. Clients
stream all the time, while requests migrate from group to group, and then while each rank of the
first group is killed in turn. Every answer must equal the undisturbed answer of the same groups;
``python -m benchmarks.models --gpus N`` compares answers of groups with vLLM alone. Writes
``build/bench-groups-N.json``; exit code 1 when a figure was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.faults import MAX_MODEL_LEN, alone_answers, pages_leaked, settle, summary
from benchmarks.load import Ask, Stream, ask, client_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of
from benchmarks.report import at_least, at_most, finish

ARCHITECTURES = ["llama", "mixtral", "qwen2", "qwen3"]
# Large enough for as many attention heads as a group has GPUs.
MODEL_BYTES = {2: 10_000_000, 4: 20_000_000}
LARGER: dict[int, dict[str, int]] = {2: {}, 4: {"mixtral": 40_000_000}}
NUM_GROUPS = 2
NUM_AT_ONCE = 8
NUM_PROMPTS = 2
NUM_TOKENS = 100
WANTED_MIGRATIONS = 50
WANTED_SWITCHES = 200
_ROOM = 1.6  # models on a group
_MAX_PHASE_S = 600.0
_PAUSE_S = 0.5


class Goal(NamedTuple):
    """The migrations and switches after which a phase of migrations ends, and the longest phase."""

    num_migrations: int = WANTED_MIGRATIONS
    num_switches: int = WANTED_SWITCHES
    max_phase_s: float = _MAX_PHASE_S


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.groups")
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2, help="GPUs of a group")
    parser.add_argument("--out", type=Path, help="default: build/bench-groups-N.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpupool-groups-") as name:
        checkpoints = _checkpoints(Path(name), arguments.gpus)
        with _groups(checkpoints, arguments.gpus) as daemon:
            names = [path.name for path in checkpoints]
            phases = asyncio.run(run_phases(daemon, names, list(_PHASES), Goal()))
    figures: dict[str, dict[str, Any]] = {}
    for phase, measured in phases.items():
        lost = measured["requests"] - measured["completed"]
        figures[f"{phase}_lost"] = at_most(lost, 0)
        figures[f"{phase}_differing"] = at_most(measured["differing_texts"], 0)
        figures[f"{phase}_pages_leaked"] = at_most(measured["pages_leaked"], 0)
    migrating = phases["migrations"]
    figures["migrations"] = at_least(migrating["num_migrations"], WANTED_MIGRATIONS)
    figures["switches"] = at_least(migrating["num_switches"], WANTED_SWITCHES)
    figures["ranks_killed"] = at_least(phases["kills"]["num_kills"], arguments.gpus)
    out = arguments.out or Path("build") / f"bench-groups-{arguments.gpus}.json"
    return finish(out, figures, phases=phases)


def _checkpoints(folder: Path, num_gpus: int) -> list[Path]:
    sizes = dict.fromkeys(ARCHITECTURES, MODEL_BYTES[num_gpus]) | LARGER[num_gpus]
    return [path for name, size in sizes.items() for path in make_checkpoints(folder, [name], size)]


@contextlib.contextmanager
def _groups(checkpoints: Sequence[Path], num_gpus: int) -> Iterator[PrivateDaemon]:
    num_bytes = int(_ROOM * max(weight_bytes(path) for path in checkpoints)) + (4 << 20)
    config = emulated_config(num_bytes, NUM_GROUPS, num_gpus)
    with private_daemon(config) as daemon:
        everywhere = list(range(NUM_GROUPS))
        for path in checkpoints:
            options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "devices": everywhere}
            daemon.add_model(path.name, path, **options)
        yield daemon


async def run_phases(
    daemon: PrivateDaemon, models: Sequence[str], names: Sequence[str], goal: Goal
) -> dict[str, dict[str, Any]]:
    """Stream from the models while each of the phases goes on; return each phase's results.

    The phases are ``migrations`` between the first two groups, and ``kills`` of the ranks of the
    first group.

    Raises:
        TimeoutError: a group is not back after the death of a rank.
    """
    kinds = [Ask(model, index, NUM_TOKENS) for index in range(NUM_PROMPTS) for model in models]
    async with client_of(daemon.http_url) as client:
        alone = await alone_answers(client, kinds)
        phases = {}
        for name in names:
            streams: list[Stream] = []
            started_s = time.monotonic()
            async with _streaming(lambda kind: ask(client, kind), kinds, streams):
                disturbed = await asyncio.to_thread(_PHASES[name], daemon, goal)
            seconds = time.monotonic() - started_s
            await asyncio.to_thread(settle, daemon)
            phases[name] = summary(streams, alone) | disturbed
            phases[name] |= {"seconds": seconds, "pages_leaked": pages_leaked(daemon)}
    return phases


@contextlib.asynccontextmanager
async def _streaming(
    send: Callable[[Ask], Any], kinds: Sequence[Ask], streams: list[Stream]
) -> AsyncIterator[None]:
    """Ask one request after the other inside the context, several at once."""
    queue, stop = itertools.cycle(kinds), asyncio.Event()

    async def stream_on() -> None:
        while not stop.is_set():
            streams.append(await send(next(queue)))

    readers = [asyncio.create_task(stream_on()) for _ in range(NUM_AT_ONCE)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*readers)


def _migrate(daemon: PrivateDaemon, goal: Goal) -> dict[str, Any]:
    """Drain one group after the other until enough requests have migrated."""
    before = _counts(daemon)
    ends_s = time.monotonic() + goal.max_phase_s
    for number in itertools.cycle(range(NUM_GROUPS)):
        counts = {name: count - before[name] for name, count in _counts(daemon).items()}
        is_enough = (
            counts["num_migrations"] >= goal.num_migrations
            and counts["num_switches"] >= goal.num_switches
        )
        if is_enough or time.monotonic() > ends_s:
            return counts
        with daemon.client() as client:
            client.drain(number)
            time.sleep(_PAUSE_S)
            client.undrain(number)
    raise AssertionError("the cycle has no end")


def _kill_each_rank(daemon: PrivateDaemon, goal: Goal) -> dict[str, Any]:
    """Kill each rank of the first group, the last first, and wait for the new group each time."""
    num_ranks = len(ranks_of(daemon))
    for rank in reversed(range(num_ranks)):
        pids = ranks_of(daemon)
        os.kill(pids[rank], signal.SIGKILL)
        ends_s = time.monotonic() + goal.max_phase_s
        while not _are_new(ranks_of(daemon), pids) or not _is_ready(daemon):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the group is not back after the death of rank {rank}")
            time.sleep(_PAUSE_S)
    return {"num_kills": num_ranks}


def _are_new(ranks: list[int], former: list[int]) -> bool:
    """Return whether all processes of the group are there, and none of the former ones."""
    return len(ranks) == len(former) and not set(ranks) & set(former)


_PHASES = {"migrations": _migrate, "kills": _kill_each_rank}


def _is_ready(daemon: PrivateDaemon) -> bool:
    with daemon.client() as client:
        now = client.ps()
    states = {row.state for row in now.devices} | {row.state for row in now.models}
    return states == {"ready"}


def ranks_of(daemon: PrivateDaemon) -> list[int]:
    """Return the processes of the first group by rank, none while it is down."""
    with daemon.client() as client:
        leader = client.ps().devices[0].pid
    if leader is None:
        return []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(leader).children()
        followers = [one for one in children if module_of(one) == "gpupoold.worker.follower"]
        return [leader, *(one.pid for one in followers)]
    return []


def _counts(daemon: PrivateDaemon) -> dict[str, int]:
    """Return the migrations and switches so far."""
    transport = httpx.HTTPTransport(uds=str(daemon.socket_path))
    with httpx.Client(transport=transport, base_url="http://gpupoold") as http:
        text = http.get("/metrics").text
    [migrated] = re.findall(r'^gpupool_requests_migrated_total{.*"migrated".*} (\S+)', text, re.M)
    with daemon.client() as client:
        num_switches = client.ps().num_switches
    return {"num_migrations": int(float(migrated)), "num_switches": num_switches}


if __name__ == "__main__":
    sys.exit(main())
