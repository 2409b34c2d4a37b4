"""A stream while another worker pins: ``make bench-pinning`` writes ``build/bench-pinning.json``.

The devices are emulated, and their modelled drivers share a lock, which a driver holds for 0.1 s
per GB that it pins and for which each step waits. This process pins as the other worker: in calls
of 1 GiB, in calls of 64 MiB, and as snapshots are pinned, in idle moments. The calls are reported
and not judged: only the cache of KV is pinned so, at a worker's start.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.bench.rig import make_checkpoints, weight_bytes
from benchmarks.report import Figure, at_most, finish
from gpupoold.memory import pinning
from gpupoold.memory.emulated import ModelledDriver
from gpupoold.memory.pinning import IdleLock, PinnedMemory
from tests.functional.worker_peer import WorkerPeer

MAX_SLOWER = 1.1
MAX_CALLS_PER_S = 5.0  # one in 0.25 s, and one before the first step
_PIN_BYTES_PER_S = 10_000_000_000
_PROMPT = list(range(5, 95))
_NUM_TOKENS = 200
_ADDRESS, _NUM_BYTES = 1 << 45, 1 << 45  # the modelled driver touches no memory


class OtherDriver(ModelledDriver):
    """The other worker's driver, which refuses all calls after the stream's end."""

    has_ended = False
    num_calls = 0

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin, unless the stream has ended."""
        if self.has_ended:
            raise RuntimeError("the stream has ended")
        super().register_host(address, num_bytes)
        self.num_calls += 1


class Stream(NamedTuple):
    """The tokens of a stream, the seconds between its steps, and the calls to pin meanwhile."""

    tokens: list[int]
    pauses_s: list[float]
    num_calls: int = 0


def main() -> int:
    """Run the rounds; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.pinning")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench-pinning.json"))
    arguments = parser.parse_args()
    logging.getLogger(pinning.__name__).setLevel(logging.ERROR)  # each round ends by a refusal
    streams: dict[str, list[Stream]] = {"alone": [], "1_gib": [], "64_mib": [], "idle": []}
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as name:
        folder = Path(name)
        [path] = make_checkpoints(folder, ["llama"], 20_000_000)
        rate = {"--pin-bytes-per-s": _PIN_BYTES_PER_S, "--locks": folder}
        peer = WorkerPeer(2 * weight_bytes(path), options=rate)
        try:
            peer.load("stream", path, max_model_len=512)
            stream(peer)
            for _ in range(arguments.rounds):
                streams["alone"].append(stream(peer))
                for kind, num_bytes in {"1_gib": 1 << 30, "64_mib": 64 << 20}.items():
                    streams[kind].append(beside(folder, num_bytes, PinnedMemory.pin, peer))
                streams["idle"].append(beside(folder, 64 << 20, PinnedMemory.pin_later, peer))
        finally:
            peer.close()
    return finish(arguments.out, dict(make_figures(streams)))


def make_figures(streams: dict[str, list[Stream]]) -> Iterator[tuple[str, Figure]]:
    """The figures by name, each beside its limit."""
    expected = streams["alone"][0].tokens
    every = [one for kind in streams.values() for one in kind]
    yield "streams_that_differ", at_most(sum(one.tokens != expected for one in every), 0)
    alone_s = median(sum(one.pauses_s) for one in streams["alone"])
    for kind, found in streams.items():
        if kind != "alone":
            is_idle = kind == "idle"
            ratio = median(sum(one.pauses_s) for one in found) / alone_s
            yield f"{kind}_seconds_over_alone", at_most(ratio, MAX_SLOWER if is_idle else math.inf)
            calls_per_s = sum(one.num_calls for one in found) / sum(
                sum(one.pauses_s) for one in found
            )
            limit = MAX_CALLS_PER_S if is_idle else math.inf
            yield f"{kind}_calls_per_second", at_most(calls_per_s, limit)
        longest_s = median(max(one.pauses_s) for one in found)
        yield f"{kind}_longest_pause_s", at_most(longest_s, math.inf)


def stream(peer: WorkerPeer) -> Stream:
    """Run a request to its end."""
    request_id = f"stream {time.monotonic()}"
    peer.ask("stream", request_id, _PROMPT, max_tokens=_NUM_TOKENS, ignore_eos=True)
    tokens, times_s = peer.tokens[request_id], list[float]()
    while request_id not in peer.ended:
        num_before = len(tokens)
        peer.pump(1.0)
        if len(tokens) > num_before:
            times_s.append(time.monotonic())
    return Stream(tokens, [later - earlier for earlier, later in pairwise(times_s)])


def beside(
    folder: Path, num_bytes: int, pin: Callable[[PinnedMemory, int, int], None], peer: WorkerPeer
) -> Stream:
    """Return a stream beside another worker that pins ``num_bytes`` at a time."""
    former, pinning.PIN_BYTES = pinning.PIN_BYTES, num_bytes
    driver = OtherDriver(_PIN_BYTES_PER_S, lock=folder / "driver.lock")
    memory = PinnedMemory(driver, IdleLock(folder / "pinning.lock"))
    thread = threading.Thread(target=pin, args=(memory, _ADDRESS, _NUM_BYTES))
    thread.start()
    try:
        found = stream(peer)
        return found._replace(num_calls=driver.num_calls)
    finally:
        driver.has_ended = True
        thread.join()
        memory.close()
        driver.close()
        pinning.PIN_BYTES = former


if __name__ == "__main__":
    sys.exit(main())
