"""Gaps that clients see, with and without a pace: ``python -m benchmarks.steady_streams``.

Three models share a device that holds one of them and a part of another, and each has two streams
at a time. Writes ``build/bench-steady-streams.json``; exit code 1 when a figure was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.load import Ask, ask_all, client_of
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from benchmarks.report import at_least, at_most, finish
from gpupoold.stats.histogram import percentile

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
MODEL_BYTES = 20_000_000
NUM_STREAMS = 2
NUM_TOKENS = 200
TTFT_S, TBT_S = 5.0, 0.1
_ROOM = 1.3  # models on the device
_KV_BYTES = 32 << 20
_PACES = (None, "steady")


def main() -> int:
    """Run everything; exit code 1 when a figure was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.steady_streams")
    parser.add_argument("--out", type=Path, default=Path("build/bench-steady-streams.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpupool-steady-") as name:
        paths = make_checkpoints(Path(name), ARCHITECTURES, MODEL_BYTES)
        num_bytes = int(_ROOM * max(map(weight_bytes, paths))) + _KV_BYTES
        with private_daemon(emulated_config(num_bytes)) as daemon:
            options = {"dtype": "float32", "ttft_s": TTFT_S, "tbt_s": TBT_S}
            for path in paths:
                daemon.add_model(path.name, path, max_model_len=1024, **options)
            names = [path.name for path in paths]
            runs = {pace or "as they come": measure(daemon, names, pace) for pace in _PACES}
    steady = runs["steady"]
    figures = {
        "attainment": at_least(steady["attainment"], 1.0),
        "steady_gap_p99_s": at_most(steady["gap_p99_s"], 1.2 * TBT_S),
    }
    return finish(arguments.out, figures, runs=runs)


def measure(daemon: PrivateDaemon, models: Sequence[str], pace: str | None) -> dict[str, Any]:
    """Stream from all models at once; return the clients' gaps and the share of tokens in time."""
    before = _counts(daemon)
    times = asyncio.run(_stream_all(daemon.http_url, models, pace))
    tokens, in_time = (now - then for now, then in zip(_counts(daemon), before, strict=True))
    gaps_s = [later - sooner for one in times for sooner, later in itertools.pairwise(one)]
    return {
        "attainment": in_time / tokens,
        "tokens": tokens,
        "gap_p50_s": percentile(gaps_s, 0.5),
        "gap_p99_s": percentile(gaps_s, 0.99),
        "gap_max_s": max(gaps_s),
    }


def _counts(daemon: PrivateDaemon) -> tuple[int, int]:
    with daemon.client() as client:
        rows = client.ps().models
    return sum(row.tokens for row in rows), sum(row.tokens_in_time for row in rows)


async def _stream_all(url: str, models: Sequence[str], pace: str | None) -> list[list[float]]:
    headers = {} if pace is None else {"X-Gpupool-Pace": pace}
    async with client_of(url) as client:
        paced = client.with_options(default_headers=headers)
        asks = [Ask(model, number, NUM_TOKENS) for model in models for number in range(NUM_STREAMS)]
        streams = await ask_all(paced, asks, len(asks))
    assert all(stream.is_complete for stream in streams), streams
    return [stream.times_s for stream in streams]


if __name__ == "__main__":
    sys.exit(main())
