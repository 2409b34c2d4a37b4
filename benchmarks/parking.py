"""A parked device: ``python -m benchmarks.parking``.

Two models share an emulated device that holds one and a third of them. The device is parked some
times, and a request wakes it. Writes ``build/bench-parking.json``; exit code 1 when a figure was
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.load import Ask, ask_all, client_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.report import at_most, finish
from gpupoold.errors import Refused
from gpupoold.stats.histogram import percentile

ARCHITECTURES = ["llama", "qwen2"]
MODEL_BYTES = 20_000_000
NUM_ROUNDS = 5
_ROOM = 1.3  # models on the device
_KV_BYTES = 32 << 20
_POLL_S = 0.05


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.parking")
    parser.add_argument("--out", type=Path, default=Path("build/bench-parking.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpupool-parking-") as name:
        paths = make_checkpoints(Path(name), ARCHITECTURES, MODEL_BYTES)
        num_bytes = int(_ROOM * max(map(weight_bytes, paths))) + _KV_BYTES
        with private_daemon(emulated_config(num_bytes)) as daemon:
            for path in paths:
                daemon.add_model(path.name, path, max_model_len=1024, dtype="float32")
            found = measure(daemon, [path.name for path in paths])
    figures = {
        "workers_while_parked": at_most(found["workers_while_parked"], 0),
        "differing_answers": at_most(found["differing_answers"], 0),
    }
    return finish(arguments.out, figures, **found)


def measure(daemon: PrivateDaemon, models: list[str]) -> dict[str, Any]:
    """Return times of first tokens after switches and after waking, and memory."""
    expected = {model: first_answer(daemon, model) for model in models}
    switches_s, wakes_s, num_differing, num_workers = [], [], 0, 0
    before_bytes = after_bytes = 0
    for _ in range(NUM_ROUNDS):
        for model in models:
            switches_s.append(first_answer(daemon, model)[0])
        before_bytes = _bytes(daemon)
        park(daemon)
        after_bytes = _bytes(daemon)
        num_workers += len(_workers(daemon))
        for model in models:  # the first wakes the device, the second is loaded by its request
            ttft_s, token_ids = first_answer(daemon, model)
            wakes_s.append(ttft_s)
            num_differing += token_ids != expected[model][1]
    return {
        "switch_ttft_p50_s": percentile(switches_s, 0.5),
        "wake_ttft_p50_s": percentile(wakes_s[::2], 0.5),
        "load_ttft_p50_s": percentile(wakes_s[1::2], 0.5),
        "process_bytes_before": before_bytes,
        "process_bytes_parked": after_bytes,
        "workers_while_parked": num_workers,
        "differing_answers": num_differing,
    }


def park(daemon: PrivateDaemon) -> None:
    """Park the device when it is idle, and return when its worker has ended."""
    with daemon.client() as client:
        while True:
            try:
                client.park(0)
                break
            except Refused:
                time.sleep(_POLL_S)
    while _workers(daemon):
        time.sleep(_POLL_S)


def first_answer(daemon: PrivateDaemon, model: str) -> tuple[float, list[int]]:
    """Return the time to the first token and the tokens of a short answer."""

    async def one() -> tuple[float, list[int]]:
        async with client_of(daemon.http_url) as client:
            begun_s = time.monotonic()
            [stream] = await ask_all(client, [Ask(model, 1, 8)], 1)
            assert stream.is_complete, stream
            return stream.times_s[0] - begun_s, stream.token_ids

    return asyncio.run(one())


def _processes(daemon: PrivateDaemon) -> list[psutil.Process]:
    process = psutil.Process(daemon.process.pid)
    return [process, *process.children(recursive=True)]


def _workers(daemon: PrivateDaemon) -> list[psutil.Process]:
    found = []
    for one in _processes(daemon):
        try:
            if "gpupoold.worker --device" in " ".join(one.cmdline()):
                found.append(one)
        except psutil.Error:  # it has just ended
            continue
    return found


def _bytes(daemon: PrivateDaemon) -> int:
    """Return the memory of all processes, shared memory counted once in each."""
    num_bytes = 0
    for one in _processes(daemon):
        with contextlib.suppress(psutil.Error):  # it has just ended
            num_bytes += one.memory_full_info().pss
    return num_bytes


if __name__ == "__main__":
    sys.exit(main())
