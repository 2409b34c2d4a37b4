"""``make bench-hostile``: requests that once crashed or hung a process, beside a hundred streams.

Each kind of request (``hostile_kinds.py``) is sent several times to a running daemon with real
engines, and must be answered once, at once and with 4xx, or with 200 if the request is permitted.
("At once" is within 0.1 s, for large bodies more than an ordinary request of the same size.)
Dripping uploads must end, and not stop the uploads of another key. No stream may differ or pause
for much longer than beside ordinary requests, no process may be replaced, and ten seconds later
nothing may be held, nor more memory of the daemon and of each frontend. Writes
``build/bench-hostile.json``; exit code 1 if a condition fails.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.dripping_uploads import drip
from benchmarks.fuzz import exchange
from benchmarks.hostile_kinds import KINDS, MAY_END, ORDINARY, PERMITTED, TAKES_TIME, MakeRequest
from benchmarks.neighbour import Felt, Neighbour
from benchmarks.noise import MORE_PAUSE_S
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.processes import module_of, processes
from benchmarks.report import Figure, at_most, finish
from gpupoold.api.schemas_access import AddKeyRequest
from gpupoold.stats.histogram import percentile

MODEL = "llama"
NUM_STREAMS = 100
ROUNDS = 5
ANSWER_LIMIT_S = 0.1
MEMORY_LIMIT_BYTES = 20 << 20
_BESIDE_S = 20.0
_PATIENCE_S = 60.0
_RETURN_S = 10.0
"""Time after which nothing may be held for a request that has ended."""


def main() -> int:
    """Run it; see the module."""
    arguments = _parse()
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        [checkpoint] = make_checkpoints(Path(folder), [MODEL], 10_000_000)
        room = emulated_config(weight_bytes(checkpoint) + (256 << 20))
        with private_daemon(room) as daemon:
            daemon.add_model(MODEL, checkpoint, max_model_len=1024, dtype="float32")
            details = _measure(daemon, arguments.streams, arguments.only)
    return finish(arguments.out, dict(make_figures(details)), details=details)


def make_figures(details: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The figures by name, each beside its limit."""
    for name, answer in details["answers"].items():
        is_permitted = name in PERMITTED
        right = {200} if is_permitted else {*range(400, 500), *([0] if name in MAY_END else [])}
        wrong = [one for one in answer["statuses"] if one not in right]
        yield f"{name}_wrong_statuses", at_most(len(wrong), 0)
        if not is_permitted and name not in TAKES_TIME:
            more_s = details["ordinary"].get(name, {"median_s": 0.0})["median_s"]
            yield f"{name}_answered_p50_s", at_most(answer["median_s"], more_s + ANSWER_LIMIT_S)
    dripping = details["dripping_uploads"]
    ended_otherwise = [status for status in dripping["ended"] if not 400 <= status < 500]
    not_ended = not dripping["ended"]
    yield "dripping_uploads_wrong_statuses", at_most(len(ended_otherwise) + not_ended, 0)
    refused = [status for status in (*dripping["beside"], dripping["after"]) if status != 200]
    yield "uploads_refused_beside_dripping_ones", at_most(len(refused), 0)
    most_s = details["pause_beside_ordinary_s"] + MORE_PAUSE_S
    yield "longest_pause_s", at_most(details["pause_beside_s"], most_s)
    yield "differing_answers", at_most(details["differing"], 0)
    yield "failed_answers", at_most(len(details["failed"]), 0)
    yield "held_after_10s", at_most(details["held"], 0)
    yield "processes_replaced", at_most(len(details["processes_replaced"]), 0)
    for name in ("daemon_growth_bytes", "frontend_growth_bytes"):
        yield name, at_most(details[name], MEMORY_LIMIT_BYTES)


def _measure(daemon: PrivateDaemon, num_streams: int, kinds: Sequence[str]) -> dict[str, Any]:
    port = int(daemon.http_url.rpartition(":")[2])
    ordinary, beside_ordinary = _send_ordinary(port, num_streams)
    before, resident = _processes(daemon), _resident_bytes(daemon)
    of_frontends = _frontend_bytes(daemon)
    neighbour = Neighbour(port, MODEL, num_streams)
    time.sleep(_BESIDE_S / 4)
    answers = asyncio.run(_send(port, {name: KINDS[name] for name in kinds}))
    with daemon.client() as client:
        key = client.add_key(AddKeyRequest(name="uploads")).text
    dripping = asyncio.run(drip(port, key))
    time.sleep(_BESIDE_S / 4)
    beside = neighbour.stop()
    time.sleep(_RETURN_S)
    with daemon.client() as client:
        num_live = client.status().num_live_requests
    for answer in answers.values():
        answer["longest_pause_s"] = _longest_pause_s(beside, answer.pop("windows"))
    return {
        "answers": answers,
        "dripping_uploads": dripping,
        "ordinary": ordinary,
        "pause_beside_ordinary_s": beside_ordinary.longest_pause_s,
        "pause_beside_s": beside.longest_pause_s,
        "differing": beside.differing + beside_ordinary.differing,
        "failed": beside.failed,
        "answers_of_streams": beside.answers,
        "processes_replaced": sorted(before ^ _processes(daemon)),
        "daemon_growth_bytes": _resident_bytes(daemon) - resident,
        "frontend_growth_bytes": max(
            num_bytes - of_frontends.get(pid, 0)
            for pid, num_bytes in _frontend_bytes(daemon).items()
        ),
        "held": num_live + _num_connections(daemon, port),
    }


def _send_ordinary(port: int, num_streams: int) -> tuple[dict[str, Any], Felt]:
    """Send ordinary requests beside the streams, which were alone before, when caches fill."""
    neighbour = Neighbour(port, MODEL, num_streams)
    time.sleep(_BESIDE_S)
    neighbour.stop()
    neighbour = Neighbour(port, MODEL, num_streams)
    time.sleep(_BESIDE_S / 4)
    answers = asyncio.run(_send(port, ORDINARY))
    return answers, neighbour.stop()


async def _send(port: int, kinds: Mapping[str, MakeRequest]) -> dict[str, dict[str, Any]]:
    """Send the kinds one after the other; return their statuses and times.

    ``windows`` are the times of begin and end, by the wall clock as a neighbour's pauses.
    """
    statuses: dict[str, list[int]] = {name: [] for name in kinds}
    windows: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(ROUNDS):
        for name, make in kinds.items():
            data = make(MODEL, number)
            began_at = time.time()
            answer = await exchange(port, data, _PATIENCE_S)
            windows[name].append((began_at, time.time()))
            statuses[name].append(_status(answer))
            await asyncio.sleep(_BESIDE_S / 40)
    times_s = {name: [end - start for start, end in windows[name]] for name in kinds}
    return {
        name: {
            "statuses": sorted(set(statuses[name])),
            "median_s": percentile(times_s[name], 0.5),
            "longest_s": max(times_s[name]),
            "windows": windows[name],
        }
        for name in kinds
    }


def _longest_pause_s(felt: Felt, windows: Sequence[tuple[float, float]]) -> float:
    """Return the longest pause that began while requests of a kind were answered."""
    return max(
        (
            pause_s
            for began_at, pause_s in felt.pauses
            if any(start - pause_s < began_at < end for start, end in windows)
        ),
        default=0.0,
    )


def _status(answer: bytes) -> int:
    """Return the status of an answer, 0 without one, -1 for more than one."""
    found = re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)
    return int(found[0]) if len(found) == 1 else -min(1, len(found))


def _processes(daemon: PrivateDaemon) -> set[int]:
    return {one.pid for one in processes(daemon)}


def _resident_bytes(daemon: PrivateDaemon) -> int:
    found: int = psutil.Process(daemon.process.pid).memory_info().rss
    return found


def _frontend_bytes(daemon: PrivateDaemon) -> dict[int, int]:
    """Return the private memory of each frontend."""
    frontends = [one for one in processes(daemon) if module_of(one) == "gpupoold.frontend"]
    return {one.pid: one.memory_full_info().uss for one in frontends}


def _num_connections(daemon: PrivateDaemon, port: int) -> int:
    """Return the number of clients' connections that the frontends have open."""
    frontends = [one for one in processes(daemon) if module_of(one) == "gpupoold.frontend"]
    open_ones = [one for frontend in frontends for one in frontend.net_connections("tcp")]
    return sum(one.status != psutil.CONN_LISTEN and one.laddr.port == port for one in open_ones)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/bench-hostile.json"))
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
