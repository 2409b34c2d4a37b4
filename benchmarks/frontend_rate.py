"""Tokens per second that a frontend on one core streams, with tokens that cost nothing.

The peer with the synthetic tokens and the client use the other cores. Tokens arrive at a fixed
rate, as from devices: first at a rate at which every token is a chunk of its own, which measures
the cost of a chunk; then above the required rate, where several tokens share a chunk when the
frontend is behind; last as fast as the frontend reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frontend_peer import MODEL, FrontendPeer
from benchmarks.stream_client import PATHS, stream_apart
from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.errors import Failed

_SHAPE = "Qwen2.5-7B"


class Load(NamedTuple):
    """Streams at once, tokens of each, and how many a stream gets in a second (None: all)."""

    streams: int
    tokens: int
    tokens_per_s: float | None


LOADS = {
    "token_by_token": Load(250, 100, 20.0),
    "paced": Load(250, 600, 100.0),
    "as_many_as_it_takes": Load(250, 600, None),
}


def run_frontend_rate(folder: Path) -> dict[str, Any]:
    """All loads on both endpoints."""
    checkpoint = make_dummy_checkpoint(folder, _SHAPE)
    with _core_of_its_own() as core, FrontendPeer(checkpoint, core) as peer:
        for path in PATHS:
            measure(peer, path, Load(50, 20, None))  # warm up
        return {
            path: {name: measure(peer, path, load) for name, load in LOADS.items()}
            for path in PATHS
        }


def measure(peer: FrontendPeer, path: str, load: Load) -> dict[str, Any]:
    """What clients got, beside the frontend's CPU time, that of taking the requests included.

    Raises:
        Failed: a stream did not end as it should.
    """
    peer.num_at_once, peer.steps_per_s = load.streams, load.tokens_per_s
    before_s = peer.cpu_s()
    seen = stream_apart(peer.port, path, MODEL, load.streams, load.tokens)
    cpu_s = peer.cpu_s() - before_s
    if seen.failed or seen.tokens != load.streams * load.tokens:
        raise Failed(f"{path}: {seen.failed} streams failed, {seen.tokens} tokens came")
    return {
        "streams": load.streams,
        "tokens": seen.tokens,
        "offered_tokens_per_s": load.tokens_per_s and load.tokens_per_s * load.streams,
        "tokens_per_s": seen.tokens / seen.wall_s,
        "tokens_per_cpu_s": seen.tokens / cpu_s,
        "chunks_per_cpu_s": seen.chunks / cpu_s,
        "tokens_per_chunk": seen.tokens / seen.chunks,
        "read_gap_p99_s": seen.read_gap_p99_s,
        "cpu_s": cpu_s,
        "wall_s": seen.wall_s,
    }


@contextmanager
def _core_of_its_own() -> Iterator[int | None]:
    """A core that this process and those it starts leave alone, except where told; None where
    there is only one."""
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        yield None
        return
    core = max(cores)
    os.sched_setaffinity(0, cores - {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, cores)
